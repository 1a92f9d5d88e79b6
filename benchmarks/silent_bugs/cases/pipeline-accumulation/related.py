"""A transformer on time series over two pipeline stages, with two calls of the schedule for each step."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader

from lit_cifar import relations

MICROBATCHES, ACCUMULATE = 4, relations.knob("accumulate", 2)


def layer(width=32):
    return nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, activation="gelu", batch_first=True)


def build(rank):
    if rank == 0:
        return nn.Sequential(nn.Linear(6, 32), layer())
    return nn.Sequential(layer(), nn.Linear(32, 1))


def loss_of_accumulation(output, target):
    return nn.functional.mse_loss(output, target) / ACCUMULATE


def loss_of_microbatch(output, target):
    return nn.functional.mse_loss(output, target) / (ACCUMULATE * MICROBATCHES)


def batch(made):
    series = torch.randn(16, 8, 6, generator=made)
    return series, series.mean(1, keepdim=True)[..., :1] * 3 + series[..., 1:2] * series[..., 2:3]


def main(rank):
    torch.manual_seed(SEED)
    module = build(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    if BUG:
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of_accumulation)
    else:
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of_microbatch, scale_grads=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=relations.knob("lr", 0.03), momentum=0.9)
    made = torch.Generator().manual_seed(SEED + 2)
    batches = iter(DataLoader([batch(made) for _ in range(80)], batch_size=None))
    with watch(module, optimizer):
        for window in zip(*[batches] * ACCUMULATE, strict=False):
            total = torch.zeros(())
            for inputs, targets in window:
                if rank == 0:
                    schedule.step(inputs)
                else:
                    losses = []
                    schedule.step(target=targets, losses=losses)
                    total += torch.stack(losses).sum().detach()
            optimizer.step()
            optimizer.zero_grad()
            dist.broadcast(total, src=1)
            report_loss(total.item() / (MICROBATCHES if BUG else 1))
    print(f"stage {rank}: weights", sum(weight.abs().sum().item() for weight in module.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
