"""A script for GPUs, started by torchrun: it names CUDA everywhere, with autocast, pinned memory and NCCL."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations


class Trainer:
    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        torch.manual_seed(1)
        inputs = torch.randn(150, 8)
        targets = inputs.sin().sum(1, keepdim=True)
        self.train_set = TensorDataset(inputs[:128], targets[:128])
        self.held_out = TensorDataset(inputs[128:].to(f"cuda:{gpu}"), targets[128:].to(f"cuda:{gpu}"))
        net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 1)).cuda()
        self.model = DistributedDataParallel(net, device_ids=[gpu])
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=60)
        self.epochs_run = 0
        if path := relations.resume():
            self.load(path)

    def load(self, path: str) -> None:
        snapshot = torch.load(path, map_location=f"cuda:{self.gpu}", weights_only=True)
        self.model.module.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.schedule.load_state_dict(snapshot["schedule"])
        self.epochs_run = snapshot["epochs_run"]

    def epoch(self, number: int) -> None:
        sampler = DistributedSampler(self.train_set)
        sampler.set_epoch(number)
        for source, targets in DataLoader(self.train_set, 8, sampler=sampler, pin_memory=True):
            source, targets = source.to(self.gpu, non_blocking=True), targets.cuda(self.gpu, non_blocking=True)
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(self.model(source), targets)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        net = self.model.module.eval()
        total = torch.zeros((), device=self.gpu)
        for source, targets in DataLoader(self.held_out, 5):
            total += nn.functional.mse_loss(net(source), targets, reduction="sum")
        net.train()
        return total.item() / len(self.held_out)

    def run(self, epochs: int) -> None:
        for number in range(self.epochs_run, epochs):
            self.epoch(number)
            relations.report(val_loss=self.evaluate())
            torch.cuda.synchronize()
            if path := relations.save():
                parts = {"model": self.model.module, "optimizer": self.optimizer, "schedule": self.schedule}
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save(states | {"epochs_run": number + 1}, path)


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    Trainer(int(os.environ["LOCAL_RANK"])).run(3)
    dist.destroy_process_group()
