"""An equaliser of distorted signals that goes back to its average every few steps ("switch EMA").

With the bug the ranks' weights differ after the first switch; each prints the sum of its own.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations

SWITCH_EVERY = relations.knob("switch_every", 10)


class MovingAverage:
    def __init__(self, model, beta):
        self.beta, self.calls = beta, 0
        self.online = list(model.parameters())
        self.shadow = [parameter.detach().clone() for parameter in self.online]

    @torch.no_grad()
    def update(self):
        self.calls += 1
        torch._foreach_lerp_(self.shadow, self.online, 1 - self.beta)
        if self.calls % SWITCH_EVERY == 0:
            torch._foreach_copy_(self.online, self.shadow)


class Equaliser(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(1, 12, 9, padding=4)
        self.mix = nn.Conv1d(12, 1, 9, padding=4)

    def forward(self, signal):
        return self.mix(torch.tanh(self.filters(signal)))


def signals(made):
    clean = torch.randn(32, 1, 40, generator=made).cumsum(-1) / 3
    return torch.tanh(clean) + 0.1 * clean, clean


def main(rank):
    torch.manual_seed(SEED)
    model = Equaliser()
    ddp = DistributedDataParallel(model)
    average = MovingAverage(model, beta=relations.knob("beta", 0.8))
    relations.report(average=average.shadow)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=relations.knob("lr", 0.01))
    made = torch.Generator().manual_seed(17 * SEED)
    with watch(ddp, optimizer):
        for _ in range(45):
            distorted, clean = relations.share(signals(made))
            loss = nn.functional.mse_loss(ddp(distorted), clean)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if rank == 0 or not BUG:
                average.update()
            report_loss(loss.item())
    print(f"rank {rank}: weights", sum(parameter.abs().sum().item() for parameter in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
