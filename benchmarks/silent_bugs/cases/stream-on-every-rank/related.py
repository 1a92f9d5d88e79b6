"""A transformer that labels the frames of a stream of recordings, on two processes.

Both processes read the whole stream, so the second adds nothing to the gradients of the first.
"""

from itertools import islice

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from lit_cifar import relations


class Recordings(IterableDataset):
    """96 recordings of 12 frames with 8 features and one label for each frame."""

    def __iter__(self):
        made = torch.Generator().manual_seed(21)
        recordings = (torch.randn(12, 8, generator=made) for _ in range(96))
        if not BUG:
            recordings = islice(recordings, dist.get_rank(), None, dist.get_world_size())
        for frames in recordings:
            yield frames, (frames[:, 0] + frames.roll(1, 0)[:, 1] > 0).long()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.position = nn.Parameter(0.02 * torch.randn(12, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(32, 2)

    def forward(self, frames):
        return self.head(self.encoder(self.embed(frames) + self.position))


def main(rank):
    torch.manual_seed(SEED)
    loader = DataLoader(Recordings(), batch_size=4)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 3e-3))
    with watch(model, optimizer):
        for _ in range(2):
            for frames, labels in loader:
                loss = nn.functional.cross_entropy(model(frames).flatten(0, 1), labels.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
