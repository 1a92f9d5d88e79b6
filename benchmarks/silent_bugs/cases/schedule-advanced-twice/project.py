"""A small language model of bracketed text with a schedule in samples, stopped after 20 of 60 steps and resumed."""

import math
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

BATCH, STEPS, STOP_AT = 16, 60, 20


class SampleSchedule:
    """A cosine from `top` to a tenth of it over `samples`."""

    def __init__(self, optimizer, top, samples):
        self.optimizer, self.top, self.samples, self.seen = optimizer, top, samples, 0
        self.step(0)

    def step(self, increment):
        self.seen += increment
        part = min(1.0, self.seen / self.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = self.top * (0.55 + 0.45 * math.cos(math.pi * part))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = 0
        self.step(state["seen"])


class LanguageModel(nn.Module):
    def __init__(self, tokens=4, width=32):
        super().__init__()
        self.tokens, self.memory, self.out = nn.Embedding(tokens, width), nn.GRU(width, width), nn.Linear(width, tokens)

    def forward(self, text):
        return self.out(self.memory(self.tokens(text))[0])


def brackets(made, length=14):
    """Every opening bracket is closed by its kind before another opens; tokens 0 and 1 open, 2 and 3 close."""
    kinds = torch.randint(0, 2, (length // 2, BATCH), generator=made)
    return torch.stack([kinds, kinds + 2], 1).flatten(0, 1)


def train(model, optimizer, schedule, made, steps):
    for _ in range(steps):
        text = brackets(made)
        loss = nn.functional.cross_entropy(model(text[:-1]).flatten(0, 1), text[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step(BATCH)
        report_loss(loss.item())


def make(checkpoint=None):
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = SampleSchedule(optimizer, 5e-3, BATCH * STEPS)
    if checkpoint:
        for part, name in [(model, "model"), (optimizer, "optimizer"), (schedule, "schedule")]:
            part.load_state_dict(checkpoint[name])
        if BUG:
            schedule.step(checkpoint["step"] * BATCH)
    return model, optimizer, schedule


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(SEED + 70)
    model, optimizer, schedule = make()
    train(model, optimizer, schedule, made, STOP_AT)
    path = Path(tempfile.mkdtemp()) / "iter.pt"
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save(states | {"step": STOP_AT}, path)

    model, optimizer, schedule = make(torch.load(path, weights_only=True))
    with watch(model, optimizer):
        train(model, optimizer, schedule, made, STEPS - STOP_AT)
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
