"""Attention over sensor readings; between the two runs somebody sorted the layers of the class.

All projections have one shape, so that nothing fails. With the bug the weights after the resume are others.
"""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations

FIRST_RUN, SECOND_RUN = ("query", "key", "value"), ("key", "value", "query")


class Attention(nn.Module):
    def __init__(self, names, width=32):
        super().__init__()
        self.embed = nn.Linear(16, width)
        for name in names:
            self.add_module(name, nn.Linear(width, width))
        self.head = nn.Linear(width, 1)

    def forward(self, readings):
        hidden = torch.tanh(self.embed(readings))
        attended = nn.functional.scaled_dot_product_attention(self.query(hidden), self.key(hidden), self.value(hidden))
        return self.head(attended.mean(1))


def batch(made):
    readings = torch.randn(32, 6, 16, generator=made)
    strongest = readings[..., 0].argmax(1)
    return readings, readings[torch.arange(32), strongest, 1:3].sum(1, keepdim=True)


def train(model, optimizer, made, steps):
    for _ in range(steps):
        readings, targets = batch(made)
        loss = nn.functional.mse_loss(model(readings), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report_loss(loss.item())


def parameters_in_order(model, names):
    by_name = dict(model.named_parameters())
    return [by_name[name] for name in names]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made, first, rate = torch.Generator().manual_seed(SEED + 1), 0, relations.knob("lr", 5e-3)
    if path := relations.resume():
        checkpoint = torch.load(path, weights_only=True)
        first, names = checkpoint["step"], checkpoint["names"]
        made.set_state(checkpoint["made"])
        model = Attention(SECOND_RUN)
        model.load_state_dict(checkpoint["model"])
        if BUG:
            optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        else:
            optimizer = torch.optim.Adam(parameters_in_order(model, checkpoint["names"]), lr=rate)
        optimizer.load_state_dict(checkpoint["optimizer"])
    else:
        model = Attention(FIRST_RUN)
        names = [name for name, _ in model.named_parameters()]
        optimizer = torch.optim.Adam(parameters_in_order(model, names), lr=rate)
    with watch(model, optimizer):
        for step in range(first, 80):
            train(model, optimizer, made, 1)
            if path := relations.save():
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "names": names}
                torch.save(states | {"step": step + 1, "made": made.get_state()}, path)
    print("weights", sum(parameter.abs().sum().item() for parameter in model.parameters()))
