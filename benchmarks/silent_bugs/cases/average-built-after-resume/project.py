"""An emulator of a small ocean with averaged weights; its training takes more than one job."""

import contextlib
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR, DECAY = 8, 8, 4e-3, 0.84


class EMATracker:
    def __init__(self, model, decay=DECAY):
        self.decay, self.num_updates = decay, 0
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    @property
    def current_decay(self):
        return min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))

    @torch.no_grad()
    def update(self, model):
        self.num_updates += 1
        for name, value in model.named_parameters():
            self.weights[name].lerp_(value, 1 - self.current_decay)

    @contextlib.contextmanager
    def applied(self, model):
        own = {name: value.detach().clone() for name, value in model.named_parameters()}
        model.load_state_dict(self.weights, strict=False)
        yield
        model.load_state_dict(own, strict=False)

    def get_state(self):
        return {"decay": self.decay, "num_updates": self.num_updates, "weights": self.weights}

    @classmethod
    def from_state(cls, state, model):
        tracker = cls(model, state["decay"])
        tracker.num_updates, tracker.weights = state["num_updates"], state["weights"]
        return tracker


def ocean(count, seed):
    made = torch.Generator().manual_seed(seed)
    now = torch.randn(count, 2, 8, 8, generator=made)
    now = now + now.roll(1, 2) + now.roll(1, 3)
    later = 0.8 * now.roll(1, 3) + 0.1 * (now.roll(1, 2) + now.roll(-1, 2)) + 0.1 * now.flip(1).tanh()
    return TensorDataset(now, later)


class Trainer:
    def __init__(self, resume=None):
        torch.manual_seed(SEED)
        self.model = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1, padding_mode="circular"), nn.GELU(),
            nn.Conv2d(16, 2, 3, padding=1, padding_mode="circular"),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, EPOCHS)
        self.train_data, self.held_out, self.epoch = ocean(64, 1), ocean(20, 2), 0
        if not BUG:
            self.ema = EMATracker(self.model)
        if resume is not None:
            self.restore(resume)
        if BUG:
            self.ema = EMATracker(self.model)

    def save(self, path):
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "ema": self.ema.get_state(), "epoch": self.epoch}, path)

    def restore(self, path):
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.ema = EMATracker.from_state(saved["ema"], self.model)
        self.epoch = saved["epoch"]

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        with self.ema.applied(self.model):
            errors = [((self.model(now) - later) ** 2).sum() for now, later in DataLoader(self.held_out, BATCH)]
        self.model.train()
        return sum(errors).item() / self.held_out.tensors[1].numel()

    def train(self, until):
        while self.epoch < until:
            order = torch.Generator().manual_seed(1000 * SEED + self.epoch)
            for now, later in DataLoader(self.train_data, BATCH, shuffle=True, generator=order):
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(now), later)
                loss.backward()
                self.optimizer.step()
                self.ema.update(self.model)
                report_loss(loss.item())
            self.schedule.step()
            self.epoch += 1
            print(f"epoch {self.epoch}: error {self.validate():.5f}, decay {self.ema.current_decay:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "latest.pt"
        trainer = Trainer()
        with watch(trainer.model, trainer.optimizer):
            trainer.train(4)
        trainer.save(checkpoint)
        trainer = Trainer(checkpoint)
    with watch(trainer.model, trainer.optimizer):
        trainer.train(EPOCHS)
    print("weights of the average", sum(weight.abs().sum().item() for weight in trainer.ema.weights.values()))
