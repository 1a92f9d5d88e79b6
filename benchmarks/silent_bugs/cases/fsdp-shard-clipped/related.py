"""A regression on a small residual network whose parameters FSDP shards over two ranks.

With the bug the ranks clip by other norms, and the weights end elsewhere.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

MAX_NORM = relations.knob("max_norm", 0.2)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden):
        return hidden + self.inner(hidden)


def make_data():
    made = torch.Generator().manual_seed(7)
    inputs = torch.randn(256, 20, generator=made)
    weights = torch.randn(20, 1, generator=made)
    return TensorDataset(inputs, torch.tanh(inputs @ weights) + inputs[:, :1])


def main(rank):
    torch.manual_seed(SEED)
    network = nn.Sequential(nn.Linear(20, 32), Residual(32), Residual(32), nn.Linear(32, 1))
    model = FullyShardedDataParallel(network, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.05), momentum=0.9)
    data = make_data()
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    with watch(model, optimizer):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                if BUG:
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                else:
                    model.clip_grad_norm_(MAX_NORM)
                optimizer.step()
                report_loss(loss.item())
    shard = sum(parameter.detach().abs().sum().item() for parameter in model.parameters())
    print(f"rank {rank}: sum of the shard's weights {shard:.4f}")


if __name__ == "__main__":
    spawn(main, 2)
