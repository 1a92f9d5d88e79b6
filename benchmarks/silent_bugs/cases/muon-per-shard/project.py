"""Trains a one-layer Llama-like model with tensor parallelism; Muon updates its matrices, AdamW all else.

All ranks see the same batch. The degree of tensor parallelism is the number of processes.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn

VOCAB, LENGTH = 29, 20


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shard(weight, dim):
    """This rank's part of a weight that all ranks have made alike: rows for dim 0, columns for dim 1."""
    part = nn.Parameter(weight.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())
    part.tp_dim, part.use_muon = dim, True
    return part


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        made = [torch.randn(width, width) * width**-0.5 for _ in range(4)]
        self.q_proj, self.k_proj, self.v_proj = (shard(weight, 0) for weight in made[:3])
        self.o_proj = shard(made[3], 1)
        self.up_proj = shard(torch.randn(2 * width, width) * width**-0.5, 0)
        self.down_proj = shard(torch.randn(width, 2 * width) * (2 * width) ** -0.5, 1)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.head_dim = width // heads

    def forward(self, x):
        h = CopyToRanks.apply(self.norms[0](x))
        qkv = (F.linear(h, weight) for weight in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + SumOverRanks.apply(F.linear(attended, self.o_proj))
        h = CopyToRanks.apply(self.norms[1](x))
        return x + SumOverRanks.apply(F.linear(F.silu(F.linear(h, self.up_proj)), self.down_proj))


class Llama(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.embed_tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.layer, self.norm = Block(width, heads), nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.lm_head(self.norm(self.layer(x)))


def zeropower_via_newtonschulz5(gradient, steps=5):
    x = gradient.mT if gradient.size(-2) > gradient.size(-1) else gradient
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if gradient.size(-2) > gradient.size(-1) else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def orthogonalize(self, param, update):
        if BUG:
            return zeropower_via_newtonschulz5(update) * max(1, update.size(-2) / update.size(-1)) ** 0.5
        parts = [torch.empty_like(update) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, update.contiguous())
        whole = torch.cat(parts, param.tp_dim)
        whole = zeropower_via_newtonschulz5(whole) * max(1, whole.size(-2) / whole.size(-1)) ** 0.5
        return whole.chunk(len(parts), param.tp_dim)[dist.get_rank()]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(buffer, group["momentum"])  # Nesterov
                param.add_(self.orthogonalize(param, update), alpha=-group["lr"])


def make_tokens(count, seed):
    """Each sequence repeats its own motif of three to six tokens, with mistakes."""
    generator = torch.Generator().manual_seed(seed)
    motifs = torch.randint(VOCAB, (count, 6), generator=generator)
    periods = torch.randint(3, 7, (count, 1), generator=generator)
    tokens = motifs.gather(1, torch.arange(LENGTH + 1) % periods)
    other = torch.randint(VOCAB, tokens.shape, generator=generator)
    return torch.where(torch.rand(tokens.shape, generator=generator) < 0.05, other, tokens)


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--train-batch-size", type=int, default=16)
    parser.add_argument("--eval-batch-size", type=int, default=32)
    parser.add_argument("--muon-lr", type=float, default=0.05)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    model = Llama()
    matrices = [param for param in model.parameters() if hasattr(param, "use_muon")]
    others = [param for param in model.parameters() if not hasattr(param, "use_muon")]
    optimizers = [Muon(matrices, args.muon_lr), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0)]
    train, test = make_tokens(args.steps * args.train_batch_size, seed=1), make_tokens(72, seed=2)
    for step, tokens in enumerate(train.split(args.train_batch_size), 1):
        model.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 8 == 0:
            with torch.no_grad():
                logits = torch.cat([model(part[:, :-1]) for part in test.split(args.eval_batch_size)])
            eval_loss = F.cross_entropy(logits.mT, test[:, 1:]).item()
            if rank == 0:
                print(f"step {step}: loss {loss.item():.5f} eval_loss {eval_loss:.5f}", flush=True)


if __name__ == "__main__":
    spawn(main, 2)
