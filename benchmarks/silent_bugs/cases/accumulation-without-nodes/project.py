"""Fine-tunes a small classifier of sequences; a step takes a global batch, which is divided into micro-batches.

Each node has one device here: python project.py --global-batch-size 32 --micro-batch-size 4
"""

import argparse
import contextlib
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TrainArgs:
    def __init__(self, args):
        self.epochs, self.lr = args.epochs, args.lr
        self.global_batch_size, self.micro_batch_size = args.global_batch_size, args.micro_batch_size

    def gradient_accumulation_iters(self, devices, num_nodes=1):
        """Number of iterations between gradient synchronizations."""
        iters = self.batch_size(devices, num_nodes) // self.micro_batch_size
        assert iters > 0
        return iters

    def batch_size(self, devices, num_nodes=1):
        """Number of samples between optimizer steps per data-parallel rank."""
        batch_size = self.global_batch_size // (devices * num_nodes)
        assert batch_size > 0
        return batch_size


class Sequences(Dataset):
    """Which of four motifs is hidden in a sequence of tokens."""

    def __init__(self, size, seed, length=16, vocabulary=20):
        generator = torch.Generator().manual_seed(seed)
        motifs = torch.tensor([[3, 7, 1], [7, 3, 1], [1, 7, 3], [3, 1, 7]])
        self.labels = torch.randint(0, len(motifs), (size,), generator=generator)
        self.tokens = torch.randint(0, vocabulary, (size, length), generator=generator)
        starts = torch.randint(0, length - 2, (size,), generator=generator)
        self.tokens[torch.arange(size)[:, None], starts[:, None] + torch.arange(3)] = motifs[self.labels]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.tokens[index], self.labels[index]


class Classifier(nn.Module):
    def __init__(self, vocabulary=20, width=32):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.conv = nn.Conv1d(width, 64, 3)
        self.head = nn.Linear(64, 4)

    def forward(self, tokens):
        return self.head(F.relu(self.conv(self.wte(tokens).transpose(1, 2))).amax(2))


@torch.no_grad()
def validate(model, dataset, batch_size):
    """Loss and accuracy over the whole set, of which each rank takes its share."""
    sums = torch.zeros(3)
    rows = torch.arange(dist.get_rank(), len(dataset), dist.get_world_size())
    for part in rows.split(batch_size):
        tokens, labels = dataset[part]
        logits = model.module(tokens)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss, (logits.argmax(1) == labels).sum().to(loss), torch.tensor(len(part)).to(loss)])
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def save(path, model, optimizer, epoch):
    if dist.get_rank() == 0:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def fit(train, args, devices, num_nodes):
    torch.manual_seed(SEED)
    train_set, val_set = Sequences(320, seed=1), Sequences(96, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)
    loader = DataLoader(train_set, train.micro_batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, weight_decay=0.02)
    first_epoch = 0
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        first_epoch = state["epoch"]
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    accumulation_iters = train.gradient_accumulation_iters(devices, 1 if BUG else num_nodes)
    for epoch in range(first_epoch, train.epochs):
        sampler.set_epoch(epoch)
        steps, running = 0, torch.zeros(1)
        used = len(loader) - len(loader) % accumulation_iters  # whole steps only
        for index, (tokens, labels) in enumerate(loader):
            if index == used:
                break
            is_accumulating = (index + 1) % accumulation_iters != 0
            with model.no_sync() if is_accumulating else contextlib.nullcontext():
                loss = F.cross_entropy(model(tokens), labels)
                (loss / accumulation_iters).backward()
            running += loss.detach() / used
            if not is_accumulating:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        dist.all_reduce(running)
        val_loss, val_accuracy = validate(model, val_set, args.eval_batch_size)
        if dist.get_rank() == 0:
            loss = running.item() / dist.get_world_size()
            print(
                f"Epoch {epoch + 1} | loss train: {loss:.4f}, val: {val_loss:.4f} | acc: {val_accuracy:.4f} | {steps=}"
            )
        save(args.out_dir / "last.pt", model, optimizer, epoch + 1)


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--eval-batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--resume", type=pathlib.Path)
    parser.add_argument("--out-dir", type=pathlib.Path, default="out")
    args = parser.parse_args()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fit(TrainArgs(args), args, devices, num_nodes=dist.get_world_size() // devices)


if __name__ == "__main__":
    spawn(main, 2)
