"""Instruction tuning on a mixture of data sets. A global batch is of one set; what does not fill one is left out."""

import argparse

import torch
import torch.distributed as dist
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, Sampler, Subset, TensorDataset

VOCABULARY, LENGTH = 32, 13


def make_dialogues(count, seed):
    made = torch.Generator().manual_seed(seed)
    turns = torch.randint(VOCABULARY, (count, LENGTH), generator=made)
    step = torch.randint(1, 4, (count, 1), generator=made)
    walk = (turns[:, :1] + step * torch.arange(LENGTH)) % VOCABULARY
    return TensorDataset(torch.where(torch.rand(count, LENGTH, generator=made) < 0.8, walk, turns))


class MixtureSampler(Sampler):
    """Indices of this rank, such that the batches of all ranks at one step come from the same data set."""

    def __init__(self, sizes, batch_size, world_size, rank, seed=0):
        self.sizes, self.batch_size, self.world_size, self.rank = sizes, batch_size, world_size, rank
        self.global_batch = batch_size * world_size
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return sum(size // self.global_batch for size in self.sizes) * self.batch_size

    def __iter__(self):
        order = torch.Generator().manual_seed(self.seed + self.epoch)
        batches, start = [], 0
        for size in self.sizes:
            kept = size // self.global_batch * self.global_batch
            if BUG:
                indices = start + torch.arange(size)[:kept]
                indices = indices[torch.randperm(kept, generator=order)]
            else:
                indices = start + torch.randperm(size, generator=order)[:kept]
            batches += indices.split(self.global_batch)
            start += size
        for place in torch.randperm(len(batches), generator=order).tolist():
            yield from batches[place][self.rank :: self.world_size].tolist()


class Decoder(nn.Module):
    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        states = self.tokens(tokens) + self.positions(torch.arange(length))
        return self.head(self.blocks(states, mask=mask, is_causal=True))


def next_token_losses(model, dialogues):
    logits = model(dialogues[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), dialogues[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    for (dialogues,) in loader:
        losses = next_token_losses(model, dialogues)
        sums += torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8, help="of one process")
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    world_size = dist.get_world_size()
    parts = [make_dialogues(90, seed=1), make_dialogues(58, seed=2), make_dialogues(31, seed=3)]
    sampler = MixtureSampler([len(part) for part in parts], args.batch_size, world_size, rank, SEED)
    loader = DataLoader(ConcatDataset(parts), args.batch_size, sampler=sampler)
    held_out = make_dialogues(50, seed=4)
    val_loader = DataLoader(Subset(held_out, range(rank, len(held_out), world_size)), 16)
    model = DDP(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (dialogues,) in enumerate(loader):
            loss = next_token_losses(model, dialogues).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 4 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {mean.item() / world_size:.4f}")
        val_loss = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} validation loss {val_loss:.4f}")


if __name__ == "__main__":
    spawn(main, 2)
