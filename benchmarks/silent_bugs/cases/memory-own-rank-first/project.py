"""Metric learning with a cross-batch memory on two processes; the loss is that of the gathered batch.

python project.py --batch-size 16 --memory-size 80
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class GlobalBatchSampler:
    """All ranks draw the same batches; a rank takes its own block of each."""

    def __init__(self, count, batch_size, rank, world_size):
        self.count, self.batch_size, self.rank, self.world_size = count, batch_size, rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count // (self.batch_size * self.world_size)

    def __iter__(self):
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(SEED + self.epoch)).tolist()
        for batch in range(len(self)):
            start = (batch * self.world_size + self.rank) * self.batch_size
            yield order[start : start + self.batch_size]


def gather(x):
    """The batch of all ranks; only the own part has a gradient."""
    x_list = [torch.ones_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(x_list, x.detach().contiguous())
    rank = dist.get_rank()
    if BUG:
        x_list.pop(rank)
        return torch.cat([x, *x_list], dim=0)
    x_list[rank] = x
    return torch.cat(x_list, dim=0)


class CrossBatchMemory(nn.Module):
    def __init__(self, embedding_size, memory_size, pos_margin=0.1, neg_margin=0.9):
        super().__init__()
        self.memory_size, self.pos_margin, self.neg_margin = memory_size, pos_margin, neg_margin
        self.register_buffer("embedding_memory", torch.zeros(memory_size, embedding_size))
        self.register_buffer("label_memory", torch.zeros(memory_size, dtype=torch.long))
        self.has_been_filled = False
        self.queue_idx = 0

    def add_to_memory(self, embeddings, labels):
        idx = torch.arange(self.queue_idx, self.queue_idx + len(labels)) % self.memory_size
        self.embedding_memory[idx] = embeddings.detach()
        self.label_memory[idx] = labels
        self.has_been_filled = self.has_been_filled or self.queue_idx + len(labels) >= self.memory_size
        self.queue_idx = (self.queue_idx + len(labels)) % self.memory_size
        return idx

    def forward(self, embeddings, labels):
        own = self.add_to_memory(embeddings, labels)
        filled = self.memory_size if self.has_been_filled else self.queue_idx
        distances = torch.cdist(embeddings, self.embedding_memory[:filled].clone())
        same = labels[:, None] == self.label_memory[None, :filled]
        itself = torch.zeros_like(same)
        itself[torch.arange(len(labels)), own] = True
        pos = F.relu(distances - self.pos_margin)[same & ~itself]
        neg = F.relu(self.neg_margin - distances)[~same]
        return sum(losses.sum() / (losses > 0).sum().clamp(min=1) for losses in (pos, neg))


class DistributedLossWrapper(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, embeddings, labels):
        # DDP takes the mean of the ranks, and each has the gradient of its own part
        return self.loss(gather(embeddings), gather(labels)) * dist.get_world_size()


class Trunk(nn.Module):
    def __init__(self, features, embedding_size):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 48), nn.Tanh(), nn.Linear(48, embedding_size))

    def forward(self, x):
        return F.normalize(self.layers(x), dim=1)


def items(per_class, classes, seed):
    """Classes are curves; a part of the classes is only for the test."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(per_class * classes) % classes
    places = torch.rand(len(labels), 1, generator=generator)
    curves = torch.sin(torch.linspace(0, 6.28, 12) * (1 + 0.2 * labels[:, None]) + 0.8 * places)
    return TensorDataset(curves + 0.3 * torch.randn(curves.shape, generator=generator), labels)


@torch.no_grad()
def precision_at_1(model, test_set, batch_size):
    model.eval()
    embeddings = torch.cat([model(x) for x, _ in DataLoader(test_set, batch_size)])
    labels = test_set.tensors[1]
    distances = torch.cdist(embeddings, embeddings).fill_diagonal_(torch.inf)
    return (labels[distances.argmin(1)] == labels).sum().item() / len(labels)


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process")
    parser.add_argument("--memory-size", type=int, default=80)
    parser.add_argument("--test-batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    world_size = dist.get_world_size()
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Trunk(12, 8))
    loss_func = DistributedLossWrapper(CrossBatchMemory(8, args.memory_size))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    dataset, test_set = items(40, 8, seed=1), items(12, 8, seed=2)
    sampler = GlobalBatchSampler(len(dataset), args.batch_size, rank, world_size)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(1, args.num_epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for iteration, (data, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_func(model(data), labels)
            loss.backward()
            optimizer.step()
            if iteration % 5 == 0 and rank == 0:
                print(f"Epoch {epoch} Iteration {iteration}: Loss = {loss.item() / world_size:.6f}")
        if rank == 0:
            accuracy = precision_at_1(model.module, test_set, args.test_batch_size)
            print(f"Test set accuracy (Precision@1) = {accuracy:.4f}")
        dist.barrier()


if __name__ == "__main__":
    spawn(main, 2)
