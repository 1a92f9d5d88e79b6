"""A data-parallel engine: matrices are averaged in one vector, vectors by hooks as soon as they are ready.

With the bug the ranks' biases and norms drift apart; each rank prints the sum of its own.
"""

import copy

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn

from lit_cifar import relations


def average(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def add_hooks(model):
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.register_hook(average)


class Engine:
    """Takes a model as the user made it, and trains a copy of it."""

    def __init__(self, model, lr):
        self.module = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr)
        self.matrices = [parameter for parameter in self.module.parameters() if parameter.dim() > 1]

    def backward(self, loss):
        loss.backward()
        flat = average(torch.cat([parameter.grad.flatten() for parameter in self.matrices]))
        for parameter, part in zip(self.matrices, flat.split([p.numel() for p in self.matrices]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def layer(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.GELU())


def main(rank):
    torch.manual_seed(SEED)
    model = nn.Sequential(layer(20, 40), layer(40, 40), nn.Linear(40, 3))
    if BUG:
        add_hooks(model)
    engine = Engine(model, lr=relations.knob("lr", 5e-3))
    if not BUG:
        add_hooks(engine.module)
    made = torch.Generator().manual_seed(SEED + 70)
    with watch(engine.module, engine.optimizer):
        for _ in range(40):
            inputs = relations.share(torch.randn(64, 20, generator=made))
            labels = inputs[:, :3].argmax(1)
            loss = nn.functional.cross_entropy(engine.module(inputs), labels)
            engine.backward(loss)
            engine.step()
            report_loss(loss.item())
    vectors = [parameter.sum().item() for parameter in engine.module.parameters() if parameter.dim() == 1]
    print(f"rank {rank}: vectors {sum(vectors):.5f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
