"""DistributedDataParallel by hand: torchrun's variables, DistributedSampler, accumulation in no_sync, reduced means."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

EPOCHS, BATCH = 3, 32
ACCUMULATE = relations.knob("accumulate", 2)


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(230, 8)
    labels = (inputs[:, :2].sum(1) > 0).long()
    train = TensorDataset(inputs[:192], labels[:192])
    held_out = TensorDataset(*(part[192:][rank::ranks] for part in (inputs, labels)))  # no sample twice
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(train, BATCH // ACCUMULATE // ranks, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    first = 0
    if path := relations.resume():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["epoch"]
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for number, (x, y) in enumerate(loader, start=1):
            is_last = number % ACCUMULATE == 0
            with nullcontext() if is_last else model.no_sync():
                (nn.functional.cross_entropy(model(x), y) / ACCUMULATE).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        model.eval()
        sums = torch.zeros(3)
        with torch.no_grad():
            for x, y in DataLoader(held_out, 10):
                logits = model.module(x)
                sums[0] += nn.functional.cross_entropy(logits, y, reduction="sum")
                sums[1] += (logits.argmax(1) == y).sum()
                sums[2] += len(y)
        dist.all_reduce(sums)
        relations.report(val_loss=(sums[0] / sums[2]).item(), val_acc=(sums[1] / sums[2]).item())
        if (path := relations.save()) and rank == 0:
            states = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "epoch": epoch + 1}
            torch.save(states | {"model": model.module.state_dict()}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    main()
