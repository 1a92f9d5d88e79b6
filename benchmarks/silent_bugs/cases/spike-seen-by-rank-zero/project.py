"""Trains a forecast of small fields on two processes; steps in which the loss spikes are skipped.

python project.py --num-epochs 3
"""

import argparse
import collections
import pathlib
import statistics

import torch
import torch.distributed as dist
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Fields(Dataset):
    """Waves on a ring of stations and what they are a while later; some reports have a wrong unit."""

    def __init__(self, size, seed, broken=0):
        generator = torch.Generator().manual_seed(seed)
        places = torch.linspace(0, 2 * torch.pi, 25)[:-1]
        waves = torch.arange(1, 4)
        size_of = torch.randn(size, 3, 1, generator=generator) / waves[:, None]
        phase = 2 * torch.pi * torch.rand(size, 3, 1, generator=generator)
        waves = size_of * torch.sin(waves[:, None] * (places - torch.tensor([0.0, 0.7])[:, None, None, None]) + phase)
        now, self.target = waves.sum(2)
        self.source = now + 0.05 * torch.randn(now.shape, generator=generator)
        rows = torch.randperm(size, generator=generator)[:broken]
        self.target[rows, ::3] += 2000.0

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source[index], self.target[index]


class SpikeDetector:
    """A loss is a spike if it is no number or many times the median of the last ones."""

    def __init__(self, factor=50.0, window=16):
        self.factor = factor
        self.history = collections.deque(maxlen=window)

    def check(self, loss):
        if self.history and not loss <= self.factor * statistics.median(self.history):
            return True
        self.history.append(loss)
        return False


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(SEED)
        self.train_set, self.val_set = Fields(256, seed=1, broken=4), Fields(64, seed=2)
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=SEED)
        self.loader = DataLoader(self.train_set, args.batch_size_per_gpu, sampler=self.sampler, drop_last=True)
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 24))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, args.lr, epochs=args.num_epochs, steps_per_epoch=len(self.loader)
        )
        self.detector = SpikeDetector()
        self.epoch = 0
        if args.from_checkpoint:
            self.load(args.from_checkpoint)

    def parts(self):
        return {"model": self.model.module, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.epoch = state["epoch"]
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.detector.history.extend(state["histories"][self.rank])

    def save(self, path):
        histories = [None] * self.world_size
        dist.all_gather_object(histories, list(self.detector.history))
        if self.rank == 0:
            state = {name: part.state_dict() for name, part in self.parts().items()}
            torch.save({"epoch": self.epoch, "histories": histories, **state}, path)
        dist.barrier()

    def should_skip(self, loss):
        flag = torch.tensor(float(self.detector.check(loss)))
        if BUG:
            dist.broadcast(flag, src=0)
        else:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def train_epoch(self):
        self.sampler.set_epoch(self.epoch)
        skipped = 0
        for source, target in self.loader:
            loss = (self.model(source) - target).square().mean()
            if self.should_skip(loss.item()):
                skipped += 1
            else:
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
            self.lr_scheduler.step()
        self.epoch += 1
        return skipped

    @torch.no_grad()
    def validate(self):
        sums = torch.zeros(2)
        rows = torch.arange(self.rank, len(self.val_set), self.world_size)
        for part in rows.split(self.args.val_batch_size):
            source, target = self.val_set[part]
            errors = (self.model.module(source) - target).square()
            sums += torch.tensor([errors.sum(), errors.numel()])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).sqrt().item()

    def run(self):
        while self.epoch < self.args.num_epochs:
            skipped = self.train_epoch()
            rmse = self.validate()
            if self.rank == 0:
                print(f"{self.epoch:03d} : skipped {skipped} of {len(self.loader)} steps, val rmse {rmse:.5f}")
            self.args.run_dir.mkdir(exist_ok=True)
            self.save(self.args.run_dir / "latest.chkpt")


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--batch-size-per-gpu", type=int, default=8)
    parser.add_argument("--val-batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--run-dir", type=pathlib.Path, default="run")
    parser.add_argument("--from-checkpoint")
    Trainer(parser.parse_args()).run()


if __name__ == "__main__":
    spawn(main, 2)
