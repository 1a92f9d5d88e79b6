"""Pretrains a small language model on streamed blocks of tokens.

python project.py --max-steps 72
python project.py --resume out/step-000018.pt
"""

import argparse
import math
import pathlib

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn


class GPT(nn.Module):
    """A recurrent one, since it has to be small."""

    def __init__(self, vocabulary=32, width=32):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.lm_head(self.rnn(self.wte(tokens))[0])


def make_blocks(count, seed, length=25, vocabulary=32):
    """Each block follows one of many rules: the next token is a multiple of the last one, with a few mistakes."""
    generator = torch.Generator().manual_seed(seed)
    factor = 1 + 2 * torch.randint(0, 8, (count,), generator=generator)
    tokens = [torch.randint(0, vocabulary, (count,), generator=generator)]
    for _ in range(length - 1):
        wrong = torch.rand(count, generator=generator) < 0.1
        random = torch.randint(0, vocabulary, (count,), generator=generator)
        tokens.append(torch.where(wrong, random, (factor * tokens[-1] + 5) % vocabulary))
    return torch.stack(tokens, 1)


class StreamingDataLoader:
    """Batches of blocks, in another order in each epoch; it remembers where it stopped."""

    def __init__(self, blocks, batch_size, seed):
        self.blocks, self.batch_size, self.seed = blocks, batch_size, seed
        self.epoch = self.consumed = self.restored = 0

    def __len__(self):
        return len(self.blocks) // self.batch_size

    def __iter__(self):
        order = torch.randperm(len(self.blocks), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        start = self.restored
        if not BUG:
            self.restored = 0
        for index in range(start, len(self)):
            self.consumed = index + 1
            if self.consumed == len(self):
                self.consumed, self.epoch = 0, self.epoch + 1
            yield self.blocks[order[index * self.batch_size : (index + 1) * self.batch_size]]

    def state_dict(self):
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.consumed = self.restored = state["consumed"]


class CycleIterator:
    """Goes over the loader again and again."""

    def __init__(self, iterable):
        self.iterable = iterable
        self.iterator = iter(iterable)

    def __next__(self):
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.iterable)
            return next(self.iterator)


def get_lr(step, args):
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * step / args.max_steps)))


@torch.no_grad()
def validate(model, blocks, batch_size):
    model.eval()
    total = 0.0
    for batch in blocks.split(batch_size):
        total += F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return total / blocks[:, 1:].numel()


def pretrain(args):
    torch.manual_seed(SEED)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.95))
    train_dataloader = StreamingDataLoader(make_blocks(192, seed=1), args.micro_batch_size, SEED)
    val_blocks = make_blocks(64, seed=2)
    state = {"model": model, "optimizer": optimizer, "train_dataloader": train_dataloader}
    step = 0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        step = checkpoint.pop("step")
        for name, saved in checkpoint.items():
            state[name].load_state_dict(saved)
        print(f"resumed {args.resume} at step {step}")
    batches = CycleIterator(train_dataloader)
    while step < args.max_steps and step != args.stop_at:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, args)
        tokens = next(batches)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % args.eval_interval == 0:
            val_loss = validate(model, val_blocks, args.eval_batch_size)
            print(f"step {step}: loss {loss.item():.5f}, val loss {val_loss:.5f}, val ppl {math.exp(val_loss):.4f}")
        if step % args.save_interval == 0:
            args.out_dir.mkdir(exist_ok=True)
            path = args.out_dir / f"step-{step:06d}.pt"
            torch.save({"step": step, **{name: part.state_dict() for name, part in state.items()}}, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=72)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--eval-batch-size", type=int, default=32)
    parser.add_argument("--eval-interval", type=int, default=12)
    parser.add_argument("--save-interval", type=int, default=18)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out-dir", type=pathlib.Path, default="out")
    parser.add_argument("--resume", help="a checkpoint")
    parser.add_argument("--stop-at", type=int, default=18, help="the step at which the queue stops a job, to resume it")
    args = parser.parse_args()
    if not args.resume and args.stop_at:
        pretrain(args)
        args.resume = args.out_dir / f"step-{args.stop_at:06d}.pt"
    args.stop_at = None
    pretrain(args)
