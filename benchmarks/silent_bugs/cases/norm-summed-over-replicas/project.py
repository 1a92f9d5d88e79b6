"""Trains a small tagger with plain DDP; gradients are divided by the tokens of the whole step, then clipped.

python project.py --gradient_accumulation_steps 2 --max_grad_norm 0.5
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, TAGS, LENGTH, IGNORED = 30, 5, 12, -100


def make_data(count, seed):
    """A tag is told by a word and the kind of the word before it; the end of a sentence has no labels."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    tags = torch.where(words.roll(1, 1) % 3 == 0, words + 1, words) % TAGS
    lengths = torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
    return TensorDataset(words, torch.where(torch.arange(LENGTH) < lengths, tags, IGNORED))


class Tagger(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.cell = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, TAGS)

    def forward(self, words):
        return self.head(self.cell(self.embedding(words))[0])


class TransformersModel:
    """What a training loop calls: forward_backward, clip_grad_norm, step."""

    def __init__(self, model, lr):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self._dp_group = dist.group.WORLD
        self._clear()

    def _clear(self):
        self.num_tokens = torch.zeros((), dtype=torch.long)
        self.loss_sum = torch.zeros(())

    def forward_backward(self, words, tags):
        logits = self.model(words)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORED, reduction="sum")
        loss.backward()
        self.num_tokens += (tags != IGNORED).sum()
        self.loss_sum += loss.detach()

    def normalize(self):
        """From a mean over ranks of sums to the mean over the tokens of all ranks."""
        dist.all_reduce(self.num_tokens, group=self._dp_group)
        dist.all_reduce(self.loss_sum, group=self._dp_group)
        for parameter in self.model.parameters():
            parameter.grad.mul_(dist.get_world_size(self._dp_group) / self.num_tokens)
        return (self.loss_sum / self.num_tokens).item()

    def clip_grad_norm(self, max_grad_norm):
        gradients = [parameter.grad for parameter in self.model.parameters()]
        squared = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        if BUG:
            dist.all_reduce(squared, group=self._dp_group)
        norm = squared.sqrt()
        scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm.item()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._clear()

    @torch.no_grad()
    def evaluate(self, dataset, batch_size):
        loss, right, tokens = 0.0, 0, 0
        for words, tags in DataLoader(dataset, batch_size):
            logits = self.model.module(words)
            loss += F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="sum").item()
            right += (logits.argmax(2) == tags).sum().item()
            tokens += (tags != IGNORED).sum().item()
        return {"eval_loss": loss / tokens, "eval_accuracy": right / tokens}


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=4, help="of a micro-batch of each process")
    parser.add_argument("--eval_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.4)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    train_set, eval_set = make_data(128, seed=1), make_data(50, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    model = TransformersModel(Tagger(), args.lr)
    for epoch in range(args.num_epochs):
        sampler.set_epoch(epoch)
        losses, norms = [], []
        for index, (words, tags) in enumerate(loader):
            model.forward_backward(words, tags)
            if (index + 1) % args.gradient_accumulation_steps == 0 or index + 1 == len(loader):
                losses.append(model.normalize())
                norms.append(model.clip_grad_norm(args.max_grad_norm))
                model.step()
        if rank == 0:
            metrics = model.evaluate(eval_set, args.eval_batch_size)
            line = " ".join(f"{name}={value:.5f}" for name, value in metrics.items())
            print(f"[{epoch + 1}] loss={sum(losses) / len(losses):.5f} grad_norm={norms[-1]:.5f} {line}", flush=True)


if __name__ == "__main__":
    spawn(main, 2)
