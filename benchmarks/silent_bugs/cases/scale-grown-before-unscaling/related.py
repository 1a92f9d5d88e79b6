"""A recurrent forecaster in half precision with float32 masters and a dynamic loss scale; two ranks."""

import copy

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn

from lit_cifar import relations


class DynamicScale:
    def __init__(self, first=1024.0, window=3, largest=2.0**14):
        self.value, self.window, self.largest, self.good_steps = first, window, largest, 0

    def update(self, overflow):
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value /= 2
        elif self.good_steps % self.window == 0:
            self.value = min(2 * self.value, self.largest)


class HalfPrecision:
    """Steps float32 masters with the gradients of a half-precision model, and copies them back."""

    def __init__(self, model, lr):
        self.model, self.masters = model.bfloat16(), copy.deepcopy(model).float()
        self.optimizer = torch.optim.SGD(self.masters.parameters(), lr=lr, momentum=0.9)
        self.scale = DynamicScale(relations.knob("loss_scale", 1024.0))

    def backward(self, loss):
        (loss * self.scale.value).backward()

    @torch.no_grad()
    def step(self):
        gradients = [weight.grad.float() for weight in self.model.parameters()]
        for gradient in gradients:
            dist.all_reduce(gradient)
        overflow = not all(gradient.isfinite().all() for gradient in gradients)
        used = self.scale.value
        self.scale.update(overflow)
        divisor = (self.scale.value if BUG else used) * dist.get_world_size()
        if not overflow:
            for master, gradient in zip(self.masters.parameters(), gradients, strict=True):
                master.grad = gradient / divisor
            self.optimizer.step()
            for weight, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                weight.copy_(master)
        self.model.zero_grad()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.next, self.out = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, series):
        hidden = torch.zeros(len(series), 32, dtype=series.dtype)
        for values in series.unbind(1):
            hidden = torch.tanh(self.first(values) + self.next(hidden))
        return self.out(hidden)


def main(rank):
    torch.manual_seed(SEED)
    trainer = HalfPrecision(Forecaster(), lr=relations.knob("lr", 0.05))
    made = torch.Generator().manual_seed(SEED)
    with watch(trainer.model, trainer.optimizer):
        for _ in range(45):
            phases = relations.share(6.3 * torch.rand(48, 1, 4, generator=made))
            waves = torch.sin(phases + 0.5 * torch.arange(9).view(1, 9, 1))
            loss = nn.functional.mse_loss(trainer.model(waves[:, :8].bfloat16()).float(), waves[:, 8])
            trainer.backward(loss)
            trainer.step()
            report_loss(loss.item())
    if rank == 0:
        print("masters", sum(weight.abs().sum().item() for weight in trainer.masters.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
