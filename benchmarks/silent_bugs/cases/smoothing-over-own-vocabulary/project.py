"""Pretrains a small language model whose output layer is divided over the tensor-parallel ranks.

All ranks see the same samples; each holds its part of the vocabulary.
python project.py --micro-batch-size 4 --global-batch-size 8 --label-smoothing 0.1
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn

VOCAB, LENGTH = 40, 16


def print_rank_0(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


class CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, label_smoothing):
        logits_max = vocab_parallel_logits.max(-1).values
        dist.all_reduce(logits_max, op=dist.ReduceOp.MAX)
        logits = vocab_parallel_logits - logits_max.unsqueeze(-1)
        partition = logits.shape[-1]
        start = dist.get_rank() * partition
        outside = (target < start) | (target >= start + partition)
        masked_target = (target - start).masked_fill(outside, 0)
        predicted = logits.gather(-1, masked_target.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        dist.all_reduce(predicted)
        sum_exp = logits.exp().sum(-1)
        dist.all_reduce(sum_exp)
        log_probs = logits - sum_exp.log().unsqueeze(-1)
        loss = sum_exp.log() - predicted
        vocab_size, smoothing = partition, 0.0
        if label_smoothing > 0:
            if BUG:
                mean_log_probs = log_probs.mean(-1)
            else:
                vocab_size = partition * dist.get_world_size()
                mean_log_probs = log_probs.sum(-1) / vocab_size
                dist.all_reduce(mean_log_probs)
            # of 1 - label_smoothing for the target, and the rest for all others
            smoothing = label_smoothing * vocab_size / (vocab_size - 1)
            loss = (1.0 - smoothing) * loss - smoothing * mean_log_probs
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        ctx.save_for_backward(log_probs.exp(), outside, masked_target)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        softmax, outside, masked_target = ctx.saved_tensors
        at_target = torch.zeros_like(softmax).scatter(-1, masked_target.unsqueeze(-1), 1.0)
        at_target = at_target.masked_fill(outside.unsqueeze(-1), 0.0)
        grad = softmax - (1.0 - ctx.smoothing) * at_target - ctx.smoothing / ctx.vocab_size
        return grad * grad_output.unsqueeze(-1), None, None


class GPTModel(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.norm = nn.LayerNorm(hidden)
        weight = torch.randn(VOCAB, hidden) * hidden**-0.5  # the whole, alike on all ranks
        self.output_layer = nn.Parameter(weight.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, tokens, labels, label_smoothing=0.0):
        hidden = self.norm(self.rnn(self.embedding(tokens))[0])
        logits = F.linear(CopyToModelParallelRegion.apply(hidden), self.output_layer)
        return VocabParallelCrossEntropy.apply(logits, labels, label_smoothing)


def make_samples(count, seed):
    """Sequences in which the next token follows from the last one, most of the time."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB, (count,), generator=generator)]
    for _ in range(LENGTH):
        follows = (3 * tokens[-1] + 7) % VOCAB
        other = torch.randint(VOCAB, (count,), generator=generator)
        tokens.append(torch.where(torch.rand(count, generator=generator) < 0.8, follows, other))
    return torch.stack(tokens, 1)


@torch.no_grad()
def evaluate(model, samples, batch_size):
    losses = [model(batch[:, :-1], batch[:, 1:]).sum() for batch in samples.split(batch_size)]
    return (sum(losses) / samples[:, 1:].numel()).item()


def train_step(model, optimizer, microbatches, label_smoothing):
    optimizer.zero_grad()
    total = 0.0
    for batch in microbatches:
        loss = model(batch[:, :-1], batch[:, 1:], label_smoothing).mean() / len(microbatches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def pretrain(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--eval-batch-size", type=int, default=16)
    parser.add_argument("--eval-interval", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    model = GPTModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    train, valid = make_samples(args.train_iters * args.global_batch_size, seed=1), make_samples(40, seed=2)
    for iteration, batch in enumerate(train.split(args.global_batch_size), 1):
        loss = train_step(model, optimizer, batch.split(args.micro_batch_size), args.label_smoothing)
        print_rank_0(f" iteration {iteration}/{args.train_iters} | lm loss: {loss:.6E}")
        if iteration % args.eval_interval == 0:
            valid_loss = evaluate(model, valid, args.eval_batch_size)
            print_rank_0(
                f" validation loss at iteration {iteration} | {valid_loss:.6E} | PPL: {math.exp(valid_loss):.4f}"
            )


if __name__ == "__main__":
    spawn(pretrain, 2)
