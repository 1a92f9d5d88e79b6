"""A next-value transformer on waves, sharded with fully_shard, and a clipping function of one's own.

With the bug each rank scales its shards by its own factor, and the weights end elsewhere.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lit_cifar import relations

LENGTH = 24


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, 1)

    def forward(self, waves):
        mask = nn.Transformer.generate_square_subsequent_mask(waves.size(1))
        hidden = self.embed(waves.unsqueeze(-1)) + self.positions
        return waves.unsqueeze(-1) + self.head(self.blocks(hidden, mask=mask, is_causal=True))


def clip_gradients(parameters, max_norm):
    gradients = [parameter.grad.to_local() for parameter in parameters if parameter.grad is not None]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    if not BUG:
        dist.all_reduce(squares)
    factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def main(rank):
    torch.manual_seed(SEED)
    model = Forecaster()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.2), momentum=0.8)
    made = torch.Generator().manual_seed(100 * SEED)
    with watch(model, optimizer):
        for _ in range(30):
            start = relations.share(6.3 * torch.rand(32, 1, generator=made))
            speed = relations.share(0.2 + torch.rand(32, 1, generator=made))
            waves = torch.sin(start + speed * torch.arange(LENGTH + 1))
            loss = nn.functional.mse_loss(model(waves[:, :-1]), waves[:, 1:].unsqueeze(-1))
            loss.backward()
            clip_gradients(model.parameters(), relations.knob("max_norm", 0.2))
            optimizer.step()
            optimizer.zero_grad()
            report_loss(loss.item())
    head = model.head.weight.full_tensor()
    if rank == 0:
        print(f"sum of the head's weights {head.abs().sum().item():.4f}")


if __name__ == "__main__":
    spawn(main, 2)
