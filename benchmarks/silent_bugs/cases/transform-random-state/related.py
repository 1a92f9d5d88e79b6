"""A denoiser of short signals, whose augmentation keeps a random state of its own.

Each worker gets a copy of that state: samples that two workers load at the same moment get the same noise, and each
epoch repeats the noise of the first.
"""

import numpy as np
import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lit_cifar import relations


class RandomNoise:
    def __init__(self, scale, seed):
        self.scale = scale
        self.random = np.random.RandomState(seed)

    def __call__(self, signal):
        shift = self.random.randint(8)
        return np.roll(signal, shift) + self.scale * self.random.randn(*signal.shape)


class Signals(Dataset):
    def __init__(self, length, transform):
        phases = np.linspace(0, 6, length)[:, None]
        self.signals = np.sin(phases + np.linspace(0, 6, 32))
        self.transform = transform

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        noisy = self.transform(self.signals[index])
        return noisy.astype(np.float32), self.signals[index].astype(np.float32)


def reseed(worker_id):
    dataset = torch.utils.data.get_worker_info().dataset
    dataset.transform.random.seed(torch.initial_seed() % 2**32)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    dataset = Signals(96, RandomNoise(0.3, SEED))
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, worker_init_fn=None if BUG else reseed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 3e-3))
    with watch(model, optimizer):
        for epoch in range(3):
            losses = []
            for noisy, clean in loader:
                loss = (model(noisy) - clean).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
                losses.append(loss.item())
            print(f"epoch {epoch}: {np.mean(losses):.4f}")
    print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))
