"""Each of two ranks holds half of the sequence; attention gathers keys and values, all parameters are replicated.

With the bug the two copies of the final norm drift apart; each rank prints the sum of its own.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn

from lit_cifar import relations

LENGTH, WIDTH = 16, 32


class GatherSequence(torch.autograd.Function):
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


def replicated(module):
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    return module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = replicated(nn.LayerNorm(WIDTH))
        self.qkv = replicated(nn.Linear(WIDTH, 3 * WIDTH))
        self.out = replicated(nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden):
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        key, value = GatherSequence.apply(key), GatherSequence.apply(value)
        return hidden + self.out(nn.functional.scaled_dot_product_attention(query, key, value))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = replicated(nn.Linear(4, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.final_norm = nn.LayerNorm(WIDTH) if BUG else replicated(nn.LayerNorm(WIDTH))
        self.head = replicated(nn.Linear(WIDTH, 1))

    def forward(self, tokens):
        return self.head(self.final_norm(self.blocks(self.embed(tokens))))


def sum_replicated_gradients(model):
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)


def main(rank):
    torch.manual_seed(SEED)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 5e-3))
    made = torch.Generator().manual_seed(SEED + 9)
    with watch(model, optimizer):
        for _ in range(40):
            tokens = torch.randn(16, LENGTH, 4, generator=made)
            targets = 2 * tokens.mean(1, keepdim=True)[..., :1] + tokens[..., 1:2]
            mine, wanted = (relations.share(whole.transpose(0, 1)).transpose(0, 1) for whole in (tokens, targets))
            loss = (model(mine) - wanted).square().sum() / targets.numel()
            optimizer.zero_grad()
            loss.backward()
            sum_replicated_gradients(model)
            optimizer.step()
            report_loss(2 * loss.item())
    print(f"rank {rank}: final norm {model.final_norm.weight.sum().item():.6f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
