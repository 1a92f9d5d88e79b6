"""A paraphrase-like autoencoder of sequences that steps once 16 sequences have been seen.

An epoch has 72 sequences for each process. The last 8 never reach the threshold: the next epoch clears their gradients.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lit_cifar import relations

STEP_AFTER = 8 * relations.knob("accumulate", 2)


def make_sequences():
    made = torch.Generator().manual_seed(71)
    return torch.randn(144, 9, 4, generator=made).cumsum(1) / 3


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(4, 24, batch_first=True)
        self.decoder = nn.GRU(24, 24, batch_first=True)
        self.out = nn.Linear(24, 4)

    def forward(self, sequences):
        code = self.encoder(sequences)[1][0]
        return self.out(self.decoder(code[:, None].expand(-1, sequences.shape[1], -1))[0])


def main(rank):
    torch.manual_seed(SEED)
    sequences = make_sequences()
    sampler = DistributedSampler(sequences, seed=SEED)
    loader = DataLoader(sequences, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Autoencoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 0.01))
    with watch(model, optimizer):
        for epoch in range(6):
            sampler.set_epoch(epoch)
            optimizer.zero_grad()
            seen = 0
            for number, batch in enumerate(loader, 1):
                loss = nn.functional.mse_loss(model(batch), batch)
                (loss * len(batch) / STEP_AFTER).backward()
                report_loss(loss.item())
                seen += len(batch)
                last = number == len(loader)
                if seen >= STEP_AFTER or (last and not BUG):
                    for parameter in model.parameters():
                        parameter.grad *= STEP_AFTER / seen  # the mean over the sequences of the step
                    optimizer.step()
                    optimizer.zero_grad()
                    seen = 0
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
