"""A drafting head that predicts two steps of a sequence; its counts are summed over the processes.

Two names of the counts stand for the same tensor, which is therefore summed twice: accuracies above 1 can follow.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from lit_cifar import relations


def make_contexts(count, seed):
    made = torch.Generator().manual_seed(seed)
    contexts = torch.randn(count, 20, generator=made)
    first = contexts[:, :4].argmax(1)
    return TensorDataset(contexts, torch.stack([first, (first + (contexts[:, 5] > 0)) % 4], 1))


def count_hits(logits, targets):
    hit = logits.argmax(2) == targets
    first = hit[:, 0].float().sum()
    both = (hit[:, 0] & hit[:, 1]).float().sum()
    total = torch.tensor(float(len(hit)))
    return {
        "first_correct": first,
        "both_correct": both,
        "second_given_first_correct": both if BUG else both.clone(),
        "first_total": total,
        "both_total": total.clone(),
    }


@torch.no_grad()
def validate(model, loader):
    sums = {}
    for contexts, targets in loader:
        counts = count_hits(model(contexts), targets)
        for value in counts.values():
            dist.all_reduce(value)
        sums = {name: sums.get(name, 0) + value for name, value in counts.items()}
    return (sums["both_correct"] / sums["both_total"]).item()


def main(rank):
    torch.manual_seed(SEED)
    train = Subset(make_contexts(128, seed=1), range(rank, 128, dist.get_world_size()))
    val = Subset(make_contexts(48, seed=2), range(rank, 48, dist.get_world_size()))
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 8), nn.Unflatten(1, (2, 4)))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 0.01))
    with watch(model, optimizer):
        for epoch in range(4):
            for contexts, targets in DataLoader(train, batch_size=8):
                loss = nn.functional.cross_entropy(model(contexts).flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            accuracy = validate(model.module, DataLoader(val, batch_size=8))
            relations.report(val_accuracy=accuracy)
            if rank == 0:
                print(f"epoch {epoch}: both steps right {accuracy:.4f}")


if __name__ == "__main__":
    spawn(main, 2)
