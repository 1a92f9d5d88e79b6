"""A network that doubles the size of small made-up pictures; it is stopped between two files and goes on from the last.

The training is counted in iterations. An average of the weights is validated and saved with the rest.
"""

import copy
import tempfile
from itertools import islice
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, Sampler

TOTAL, SAVE_FREQ, VAL_FREQ = 48, 9, 12


def make_pictures(count, seed):
    coarse = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, size=16, mode="bicubic").sigmoid()


class EpochSampler(Sampler):
    def __init__(self, data):
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        made = torch.Generator().manual_seed(1000 * SEED + self.epoch)
        return iter(torch.randperm(len(self.data), generator=made).tolist())

    def __len__(self):
        return len(self.data)


class Upscaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(24, 12, 3, padding=1))
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, low):
        return self.shuffle(self.body(low)) + nn.functional.interpolate(low, scale_factor=2)


def degrade(high, seed):
    made = torch.Generator().manual_seed(seed)
    low = nn.functional.avg_pool2d(high, 2)
    return low + 0.05 * torch.randn(low.shape, generator=made)


class Restorer:
    def __init__(self):
        self.net_g = Upscaler()
        self.net_g_ema = copy.deepcopy(self.net_g).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net_g.parameters(), lr=0.005)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [20, 36], gamma=0.5)
        self.parts = {"g": self.net_g, "ema": self.net_g_ema, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def optimize(self, low, high):
        loss = nn.functional.l1_loss(self.net_g(low), high)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.net_g_ema.parameters()), list(self.net_g.parameters()), 0.1)
        return loss.item()

    @torch.no_grad()
    def validate(self, pictures):
        errors = [nn.functional.mse_loss(self.net_g_ema(degrade(p[None], 7)), p[None]) for p in pictures]
        return (-10 * torch.stack(errors).log10()).mean().item()

    def save(self, path, epoch, iteration):
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({"epoch": epoch, "iter": iteration, **parts}, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        return state["epoch"], state["iter"]


def train(path, stop):
    torch.manual_seed(SEED)
    data, held_out = make_pictures(96, 1), make_pictures(20, 2)
    sampler = EpochSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = Restorer()
    epoch, iteration = model.load(path) if path.exists() else (0, 0)
    with watch(model.net_g, model.optimizer):
        while iteration < stop:
            sampler.set_epoch(epoch)
            seen = 0 if BUG else iteration % len(loader)
            for high in islice(loader, seen, None):
                iteration += 1
                report_loss(model.optimize(degrade(high, 1000 * SEED + iteration), high))
                if iteration % VAL_FREQ == 0:
                    print(f"iteration {iteration}: psnr {model.validate(held_out):.3f}")
                if iteration % SAVE_FREQ == 0:
                    model.save(path, iteration // len(loader), iteration)
                if iteration == stop:
                    return
            epoch += 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "last.state", 20)
        train(Path(folder) / "last.state", TOTAL)
