"""Forces on the atoms of molecules of different sizes: each process has the mean error of its own atoms as its loss.

Processes hold different numbers of atoms, so the mean of their gradients is not the gradient of the mean over atoms.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_cifar import relations


class Molecules(Dataset):
    """96 molecules with 2 to 20 atoms; features of an atom and the force on it."""

    def __init__(self):
        made = torch.Generator().manual_seed(31)
        sizes = torch.randint(2, 21, (96,), generator=made).tolist()
        self.atoms = [torch.randn(size, 12, generator=made) for size in sizes]

    def __len__(self):
        return len(self.atoms)

    def __getitem__(self, index):
        atoms = self.atoms[index]
        return atoms, atoms[:, :3] * atoms[:, 3:6] / len(atoms) ** 0.5


def collate(molecules):
    return tuple(torch.cat(parts) for parts in zip(*molecules, strict=True))


def main(rank):
    torch.manual_seed(SEED)
    molecules = Molecules()
    sampler = DistributedSampler(molecules, seed=SEED)
    loader = DataLoader(molecules, batch_size=4, sampler=sampler, collate_fn=collate)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.3), momentum=0.9)
    with watch(model, optimizer):
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for atoms, forces in loader:
                loss = (model(atoms) - forces).square().sum(1).mean()
                if not BUG:
                    all_atoms = torch.tensor(float(len(atoms)))
                    dist.all_reduce(all_atoms)
                    loss = loss * len(atoms) * dist.get_world_size() / all_atoms
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
