"""A detector of bright squares with mosaic augmentation, which is off for the last epochs.

Our queue ends a job after some epochs and starts it again with --resume; main() does the same.

    python project.py
    python project.py --resume runs/last.pt
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE, GRID = 24, 6


class Squares(Dataset):
    """Pictures with one square each, or mosaics of four, and a map of the cells that hold a square's center."""

    def __init__(self, count, seed, mosaic=False):
        generator = torch.Generator().manual_seed(seed)
        self.centers = torch.randint(3, SIZE - 3, (count, 2), generator=generator)
        self.images = 0.5 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
        for image, (x, y) in zip(self.images, self.centers.tolist(), strict=False):
            image[0, y - 2 : y + 3, x - 2 : x + 3] += 1
        self.mosaic = mosaic

    def __len__(self):
        return len(self.images)

    def __getitem__(self, key):
        epoch, index = key
        rng = np.random.default_rng((SEED, epoch, index))
        image, centers = self.images[index], self.centers[index : index + 1]
        if self.mosaic:
            tiles = [index, *rng.integers(len(self), size=3).tolist()]
            small = F.avg_pool2d(self.images[tiles], 2)
            image = torch.cat([torch.cat([small[0], small[1]], 2), torch.cat([small[2], small[3]], 2)], 1)
            centers = self.centers[tiles] // 2 + SIZE // 2 * torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]])
        target = torch.zeros(GRID, GRID)
        target[centers[:, 1] * GRID // SIZE, centers[:, 0] * GRID // SIZE] = 1
        if rng.random() < 0.5:
            image, target = image.flip(2), target.flip(1)
        return image, target


class EndlessBatches:
    """Epochs one after another, each in an order of its own; the dataset is told the epoch with the index."""

    def __init__(self, size, batch, epoch):
        self.size, self.batch, self.epoch = size, batch, epoch

    def __len__(self):
        return self.size // self.batch

    def __iter__(self):
        epoch = self.epoch
        while True:
            order = np.random.default_rng((SEED, epoch)).permutation(self.size).tolist()
            for start in range(0, len(self) * self.batch, self.batch):
                yield [(epoch, index) for index in order[start : start + self.batch]]
            epoch += 1


class InfiniteLoader:
    """Keeps its workers between epochs; they load the next epoch's first batches ahead."""

    def __init__(self, dataset, batch, workers, epoch):
        self.dataset = dataset
        self.loader = DataLoader(dataset, batch_sampler=EndlessBatches(len(dataset), batch, epoch), num_workers=workers)
        self.iterator = iter(self.loader)

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self, epoch):
        self.loader.batch_sampler.epoch = epoch
        self.iterator = iter(self.loader)


class Trainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(SEED)
        ckpt = torch.load(args.resume, weights_only=True) if args.resume else None
        self.start_epoch = ckpt["epoch"] + 1 if ckpt else 0
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 1, 3, padding=1), nn.Flatten(1, 2),
        )  # fmt: skip
        self.train_loader = InfiniteLoader(Squares(96, 1, mosaic=True), args.batch, args.workers, self.start_epoch)
        val_set = Squares(60, 2)
        self.val_images, self.val_cells = val_set.images, (val_set.centers * GRID // SIZE) @ torch.tensor([1, GRID])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda e: 1 - 0.9 * e / args.epochs)
        if ckpt:
            self.resume_training(ckpt)

    def resume_training(self, ckpt):
        for name in "model", "optimizer", "scheduler":
            getattr(self, name).load_state_dict(ckpt[name])
        print(f"Resuming training from epoch {self.start_epoch} of {self.args.epochs}")
        if self.start_epoch > self.args.epochs - self.args.close_mosaic:
            self.close_dataloader_mosaic()
            if not BUG:
                self.train_loader.reset(self.start_epoch)

    def close_dataloader_mosaic(self):
        print("Closing dataloader mosaic")
        self.train_loader.dataset.mosaic = False

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        logits = torch.cat([self.model(part).flatten(1) for part in self.val_images.split(self.args.val_batch)])
        return {
            "loss": F.cross_entropy(logits, self.val_cells).item(),
            "recall": (logits.argmax(1) == self.val_cells).float().mean().item(),
        }

    def save(self, epoch):
        ckpt = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        torch.save({"epoch": epoch, **ckpt}, self.args.out / "last.pt")

    def train(self, stop):
        self.args.out.mkdir(exist_ok=True)
        for epoch in range(self.start_epoch, min(stop, self.args.epochs)):
            if epoch == self.args.epochs - self.args.close_mosaic:
                self.close_dataloader_mosaic()
                self.train_loader.reset(epoch)
            self.model.train()
            total = instances = 0
            for images, targets in self.train_loader:
                loss = F.binary_cross_entropy_with_logits(self.model(images), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.item()
                instances += int(targets.sum())
            self.scheduler.step()
            metrics = self.validate()
            shown = "  ".join(f"val_{name} {value:.4f}" for name, value in metrics.items())
            print(f"epoch {epoch}: loss {total / len(self.train_loader):.4f}  instances {instances}  {shown}")
            self.save(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--val-batch", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--close-mosaic", type=int, default=3, help="epochs at the end without mosaics")
    parser.add_argument("--epochs-per-job", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    while True:
        trainer = Trainer(args)
        trainer.train(stop=trainer.start_epoch + args.epochs_per_job)
        if trainer.start_epoch + args.epochs_per_job >= args.epochs:
            break
        args.resume = args.out / "last.pt"


if __name__ == "__main__":
    main()
