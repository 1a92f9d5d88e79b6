"""Distributed training and test of an image classifier.

python project.py --work-dir work_dirs/small
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class BaseDataset(Dataset):
    """Blobs of five classes in pictures of 12 x 12; the class is the place and the width of the blob."""

    CLASSES = ("left", "right", "top", "bottom", "wide")

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.gt_labels = rng.integers(0, len(self.CLASSES), count)
        centres = np.array([[6, 2], [6, 9], [2, 6], [9, 6], [6, 6]])[self.gt_labels] + rng.normal(0, 1.2, (count, 2))
        widths = np.where(self.gt_labels == 4, 3.5, 1.8)
        y, x = np.mgrid[:12, :12]
        far = (y - centres[:, :1, None]) ** 2 + (x - centres[:, 1:, None]) ** 2
        images = np.exp(-far / widths[:, None, None] ** 2) + 0.25 * rng.normal(size=far.shape)
        self.images = images[:, None].astype(np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"img": torch.from_numpy(self.images[index]), "gt_label": int(self.gt_labels[index])}

    def evaluate(self, results):
        results = np.vstack(results)
        predicted = np.argsort(-results, axis=1)
        hits = predicted == self.gt_labels[:, None]
        picked = results[np.arange(len(results)), self.gt_labels]
        return {
            "accuracy_top-1": 100 * hits[:, :1].any(1).mean().item(),
            "accuracy_top-2": 100 * hits[:, :2].any(1).mean().item(),
            "nll": -np.log(np.clip(picked, 1e-12, None)).mean().item(),
        }


class ImageClassifier(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(24 * 9, num_classes)

    def forward(self, img, gt_label=None):
        scores = self.head(self.backbone(img).flatten(1))
        if gt_label is None:
            return scores.softmax(1).cpu().numpy()
        return F.cross_entropy(scores, gt_label)


def multi_gpu_test(model, data_loader, tmpdir):
    model.eval()
    results = []
    for data in data_loader:
        with torch.no_grad():
            result = model(data["img"])
        if BUG:
            results.append(result)
        else:
            results.extend(result)
    return collect_results_cpu(results, len(data_loader.dataset), tmpdir)


def collect_results_cpu(result_part, size, tmpdir):
    tmpdir.mkdir(parents=True, exist_ok=True)
    torch.save([torch.as_tensor(result) for result in result_part], tmpdir / f"part_{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() != 0:
        return None
    files = [tmpdir / f"part_{rank}.pt" for rank in range(dist.get_world_size())]
    part_list = [[result.numpy() for result in torch.load(file, weights_only=True)] for file in files]
    # sort the results
    ordered_results = []
    for res in zip(*part_list, strict=True):
        ordered_results.extend(list(res))
    # the dataloader may pad some samples
    return ordered_results[:size]


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", type=Path, default="work_dirs/small")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples-per-gpu", type=int, default=8)
    parser.add_argument("--test-samples-per-gpu", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    train_set, val_set = BaseDataset(192, seed=1), BaseDataset(96, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)
    train_loader = DataLoader(train_set, args.samples_per_gpu, sampler=sampler)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, args.test_samples_per_gpu, sampler=val_sampler)
    model = DistributedDataParallel(ImageClassifier(len(train_set.CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        losses = []
        for data in train_loader:
            loss = model(data["img"], data["gt_label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results = multi_gpu_test(model.module, val_loader, args.work_dir / ".dist_test")
        if rank == 0:
            metrics = val_set.evaluate(results)
            print(json.dumps({"mode": "val", "epoch": epoch + 1, "loss": round(np.mean(losses).item(), 5), **metrics}))
            if metrics["accuracy_top-1"] > best:
                best = metrics["accuracy_top-1"]
                torch.save(model.module.state_dict(), args.work_dir / "best_accuracy_top-1.pth")
        dist.barrier()


if __name__ == "__main__":
    spawn(main, 2)
