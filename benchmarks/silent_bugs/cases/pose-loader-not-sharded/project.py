"""Trains detection-style models on two processes; the pose trainer brings its own data pipeline.

python project.py --task pose --batch 16
"""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def init_seeds(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Figures(Dataset):
    """A stick of three joints on a noisy picture; the joints are in units of the picture's size."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        middle = 0.3 + 0.4 * torch.rand(count, 1, 2, generator=generator)
        arm = 0.25 * torch.randn(count, 1, 2, generator=generator).clamp(-1, 1)
        self.joints = torch.cat([middle - arm, middle, middle + arm], 1).clamp(0, 1)
        grid = torch.linspace(0, 1, 16)
        far = (grid - self.joints[..., :1, None]) ** 2 + (grid[:, None] - self.joints[..., 1:, None]) ** 2
        weights = torch.tensor([1.0, 0.6, 0.3])[:, None, None]
        pictures = (weights * torch.exp(-far / 0.01)).sum(1, keepdim=True)
        self.pictures = pictures + 0.05 * torch.randn(pictures.shape, generator=generator)

    def __len__(self):
        return len(self.joints)

    def __getitem__(self, index):
        return {"image": self.pictures[index], "keypoints": self.joints[index]}


def pose_collate(samples):
    return (
        torch.stack([sample["image"] for sample in samples]),
        torch.stack([sample["keypoints"] for sample in samples]),
    )


class BaseTrainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        init_seeds(SEED + 1 + self.rank)
        self.train_sampler = None
        self.model = DistributedDataParallel(self._build_model())
        self._setup_data()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        total = args.epochs * len(self.train_loader)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, args.lr, total_steps=total)

    def _setup_data(self):
        dataset = self._build_dataset()
        self.train_sampler = DistributedSampler(dataset, shuffle=True, seed=SEED)
        self.train_loader = DataLoader(
            dataset, self.args.batch // self.world_size, sampler=self.train_sampler, drop_last=True
        )

    def train(self):
        for epoch in range(self.args.epochs):
            if self.train_sampler is not None:
                self.train_sampler.set_epoch(epoch)
            self.model.train()
            total = 0.0
            for images, targets in self.train_loader:
                loss = self._loss(self.model(images), targets)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                total += loss.item()
            if self.rank == 0:  # alone, with the whole validation set
                metrics = self._validate()
                print(f"epoch {epoch + 1}/{self.args.epochs}: loss {total / len(self.train_loader):.5f}", metrics)
            dist.barrier()


class PoseTrainer(BaseTrainer):
    def _build_model(self):
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 6), nn.Unflatten(1, (3, 2)),
        )  # fmt: skip

    def _build_dataset(self):
        return Figures(192, seed=1)

    def _setup_data(self):
        # samples are dicts, which want a collate function of their own
        dataset = self._build_dataset()
        self.val_set = Figures(64, seed=2)
        if BUG:
            self.train_loader = DataLoader(
                dataset, self.args.batch, shuffle=True, drop_last=True, collate_fn=pose_collate
            )
        else:
            self.train_sampler = DistributedSampler(dataset, shuffle=True, seed=SEED)
            self.train_loader = DataLoader(
                dataset,
                self.args.batch // self.world_size,
                sampler=self.train_sampler,
                drop_last=True,
                collate_fn=pose_collate,
            )

    def _loss(self, outputs, targets):
        return F.smooth_l1_loss(outputs, targets, beta=0.1)

    @torch.no_grad()
    def _validate(self):
        model = self.model.module.eval()
        distances = []
        for images, joints in DataLoader(self.val_set, self.args.val_batch, collate_fn=pose_collate):
            distances.append((model(images) - joints).norm(dim=2))
        distances = torch.cat(distances)
        return {"distance": distances.mean().item(), "pck@0.1": (distances < 0.1).to(distances).mean().item()}


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["pose"], default="pose")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="of all processes together")
    parser.add_argument("--val-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()
    {"pose": PoseTrainer}[args.task](args).train()


if __name__ == "__main__":
    spawn(main, 2)
