"""A sequence-to-sequence regression on two processes that accumulates two micro-batches of sequences of other lengths.

The number of valid positions is counted over the micro-batches of a process, but not over the processes.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

ACCUMULATE = relations.knob("accumulate", 2)


def make_data():
    made = torch.Generator().manual_seed(43)
    inputs = torch.randn(128, 10, 5, generator=made)
    targets = inputs.cumsum(1)[..., :2].tanh()
    lengths = (torch.rand(128, generator=made) ** 3 * 10).long() + 1
    valid = torch.arange(10) < lengths[:, None]
    return TensorDataset(inputs, targets, valid)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 32, batch_first=True)
        self.out = nn.Linear(32, 2)

    def forward(self, inputs):
        return self.out(self.rnn(inputs)[0])


def main(rank):
    torch.manual_seed(SEED)
    dataset = make_data()
    sampler = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.3), momentum=0.9)
    with watch(model, optimizer):
        for epoch in range(5):
            sampler.set_epoch(epoch)
            batches = list(loader)
            for first in range(0, len(batches), ACCUMULATE):
                window = batches[first : first + ACCUMULATE]
                num_items = sum(valid.sum() for _, _, valid in window)
                loss_scale = 1
                if not BUG:
                    dist.all_reduce(num_items)
                    loss_scale = dist.get_world_size()  # DDP divides by it
                step_loss = 0.0
                for number, (inputs, targets, valid) in enumerate(window, 1):
                    model.require_backward_grad_sync = number == len(window)
                    errors = (model(inputs) - targets).square().sum(2)
                    loss = errors[valid].sum() / num_items * loss_scale
                    loss.backward()
                    step_loss += loss.item()
                optimizer.step()
                optimizer.zero_grad()
                report_loss(step_loss)
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
