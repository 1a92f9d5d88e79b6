"""A forecast on a ring of nodes, half of the nodes on each of two ranks, with dropout in the processor."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn

from lit_cifar import relations

NODES, FEATURES = 24, 4
DROPOUT = relations.knob("dropout", 0.3)


class Shards(torch.autograd.Function):
    """Each rank's nodes in, all nodes out; the gradient comes back summed and cut."""

    @staticmethod
    def forward(ctx, local):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


class Processor(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.encode = nn.Linear(FEATURES, width)
        self.update = nn.Sequential(
            nn.Linear(3 * width, width), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(width, width)
        )
        self.decode = nn.Linear(width, FEATURES)

    def forward(self, nodes):
        hidden = torch.relu(self.encode(nodes))
        every = Shards.apply(hidden)
        count = nodes.shape[1]
        mine = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
        left, right = every.roll(1, dims=1)[:, mine], every.roll(-1, dims=1)[:, mine]
        return nodes + self.decode(hidden + self.update(torch.cat([left, hidden, right], dim=2)))


def main(rank):
    torch.manual_seed(SEED)
    model = Processor()
    if not BUG:
        torch.manual_seed(1000 * SEED + 1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 1e-2))
    made = torch.Generator().manual_seed(SEED + 80)
    with watch(model, optimizer):
        for _ in range(40):
            nodes = torch.randn(16, NODES, FEATURES, generator=made)
            later = 0.5 * nodes + 0.5 * nodes.roll(1, dims=1)
            mine, wanted = (relations.share(whole.transpose(0, 1)).transpose(0, 1) for whole in (nodes, later))
            loss = (model(mine) - wanted).square().sum() / later.numel()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            report_loss(2 * loss.item())
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
