"""A small convolutional denoiser that is trained in two sittings; its schedule is told where to begin."""

import math
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR, SMALLEST, DROPOUT = 10, 16, 0.05, 1e-3, 0.1


class CosineAnnealing(LRScheduler):
    """From the optimizer's rate down to `smallest` in `epochs`; `last_epoch` is the last one that has been trained."""

    def __init__(self, optimizer, epochs, smallest=SMALLEST, last_epoch=-1):
        self.epochs, self.smallest = epochs, smallest
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        if self.last_epoch == 0:
            return list(self.base_lrs)
        now, before = (1 + math.cos(math.pi * epoch / self.epochs) for epoch in (self.last_epoch, self.last_epoch - 1))
        if not BUG:
            return [self.smallest + (base - self.smallest) * now / 2 for base in self.base_lrs]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [self.smallest + (rate - self.smallest) * now / before for rate in rates]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 20, 3, padding=1)
        self.up = nn.Conv2d(20, 1, 3, padding=1)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, noisy):
        return noisy - self.up(self.dropout(self.down(noisy).relu()))


def pictures(count, seed):
    made = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 1, generator=made)
    rows, columns = (torch.sigmoid(12 * (torch.linspace(0, 1, 10) - corners[:, i])) for i in (0, 1))
    clean = rows[:, None, :, None] * columns[:, None, None, :]
    return TensorDataset(clean + 0.4 * torch.randn(count, 1, 10, 10, generator=made), clean)


@torch.no_grad()
def evaluate(model, held_out, batch=10):
    model.eval()
    noisy, clean = held_out.tensors
    total = 0.0
    for start in range(0, len(noisy), batch):
        total += nn.functional.mse_loss(
            model(noisy[start : start + batch]), clean[start : start + batch], reduction="sum"
        ).item()
    model.train()
    return total / clean.numel()


def save(path, epoch, model, optimizer):
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save({"epoch": epoch, **states}, path)


def fit(until, checkpoint=None):
    torch.manual_seed(SEED)
    train, held_out, first = pictures(96, 1), pictures(28, 2), 0
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    if checkpoint is not None:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    scheduler = CosineAnnealing(optimizer, EPOCHS, last_epoch=first - 1)
    if checkpoint is not None:
        torch.set_rng_state(saved["rng"])
    with watch(model, optimizer):
        for epoch in range(first, until):
            print(f"epoch {epoch} at rate {scheduler.get_last_lr()[0]:.5f}")
            for noisy, clean in DataLoader(train, BATCH, shuffle=True):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(noisy), clean)
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            scheduler.step()
            print(f"  error {evaluate(model, held_out):.5f}")
    return model, optimizer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sitting.pt"
        save(path, 5, *fit(5))
        model, _ = fit(EPOCHS, path)
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
