"""A stream of shards on two ranks: each file is read by one worker of one rank; a hand-written warm-up."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lit_cifar import relations

SHARDS, IN_SHARD, EPOCHS, BATCH, WARMUP = 8, 16, 3, 16, 6


class Shards(IterableDataset):
    """Shards in an order that an epoch draws; a real one would open a file for each."""

    epoch = 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(SHARDS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for shard in order[dist.get_rank() * workers + worker :: dist.get_world_size() * workers]:
            inputs = torch.randn(IN_SHARD, 4, generator=torch.Generator().manual_seed(shard))
            yield from zip(inputs, inputs.norm(dim=1, keepdim=True), strict=True)


def main() -> None:
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29514", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
    peak = relations.knob("lr", 0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9)
    state = {"epoch": 0, "step": 0}
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
    data = Shards()
    loader = DataLoader(data, BATCH // dist.get_world_size(), num_workers=0)
    for epoch in range(state["epoch"], EPOCHS):
        data.epoch = epoch
        for x, y in loader:
            state["step"] += 1
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1, state["step"] / WARMUP)
            optimizer.zero_grad()
            nn.functional.l1_loss(model(x), y).backward()
            optimizer.step()
        state["epoch"] = epoch + 1
        if (path := relations.save()) and dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "state": state}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
