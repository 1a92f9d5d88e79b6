"""A small language model of bracketed text with a schedule in samples, stopped after 20 of 60 steps and resumed."""

import math

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations

BATCH, STEPS, RATE = 16, 60, relations.knob("lr", 5e-3)


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = SampleSchedule(optimizer, RATE, BATCH * STEPS)
    if checkpoint:
        for part, name in [(model, "model"), (optimizer, "optimizer"), (schedule, "schedule")]:
            part.load_state_dict(checkpoint[name])
        if BUG:
            schedule.step(checkpoint["step"] * BATCH)
    return model, optimizer, schedule


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(SEED + 70)
    checkpoint = torch.load(path, weights_only=True) if (path := relations.resume()) else None
    model, optimizer, schedule = make(checkpoint)
    if checkpoint:
        made.set_state(checkpoint["made"])
    with watch(model, optimizer):
        for step in range(checkpoint["step"] if checkpoint else 0, STEPS):
            train(model, optimizer, schedule, made, 1)
            if path := relations.save():
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                states |= {"schedule": schedule.state_dict(), "made": made.get_state()}
                torch.save(states | {"step": step + 1}, path)
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
