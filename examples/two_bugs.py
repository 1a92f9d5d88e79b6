"""Trains a small language model in two processes, with two bugs that raise no error and that its loss does not show.

Look for them, then let the checker: python -m lit_cifar relations examples/two_bugs.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, LENGTH = 12, 24


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    # Sentences of different lengths, in which each word depends on the one before; -100 pads the targets.
    follows = torch.rand(WORDS, WORDS) ** 6
    sentences = torch.randint(WORDS, (640, 1))
    for _ in range(LENGTH):
        sentences = torch.cat([sentences, torch.multinomial(follows[sentences[:, -1]], 1)], dim=1)
    lengths = torch.randint(2, LENGTH, (640, 1))
    targets = sentences[:, 1:].where(torch.arange(LENGTH) < lengths, -100)
    data = TensorDataset(sentences[:, :-1], targets)

    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, WORDS))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    for epoch in range(3):
        for words, following in loader:
            loss = cross_entropy(model(words).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # a function, so that the model is gone before Python ends: it holds threads of the process group
