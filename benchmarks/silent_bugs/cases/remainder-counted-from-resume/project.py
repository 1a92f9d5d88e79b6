"""Train a toy classifier with an iteration based runner and its hooks.

python project.py --work-dir work_dirs/toy --resume-from work_dirs/toy/iter_48.pth
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


def toy_images(count, seed):
    """Pictures of 8 x 8 with a bar in one of four directions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    line = torch.eye(8)
    bars = torch.stack([line, line.flip(0), torch.zeros(8, 8), torch.zeros(8, 8)])
    bars[2, 3], bars[3, :, 4] = 1, 1
    images = bars[labels] + 0.9 * torch.randn(count, 8, 8, generator=generator)
    return TensorDataset(images[:, None], labels)


class IterSampler(Sampler):
    """Shuffled epochs one after another, as many samples as are asked for; resumes at `start`."""

    def __init__(self, size, num_samples, seed):
        self.size, self.num_samples, self.seed, self.start = size, num_samples, seed, 0

    def _indices(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=generator).tolist()

    def __iter__(self):
        return itertools.islice(self._indices(), self.start, self.num_samples)


class GradientCumulativeOptimizerHook:
    def __init__(self, cumulative_iters):
        self.cumulative_iters = cumulative_iters

    def before_run(self, runner):
        if BUG:
            residual_iters = runner.max_iters - runner.iter
            self.divisible_iters = residual_iters // self.cumulative_iters * self.cumulative_iters
            self.remainder_iters = residual_iters - self.divisible_iters
        else:
            self.divisible_iters = runner.max_iters // self.cumulative_iters * self.cumulative_iters
            self.remainder_iters = runner.max_iters - self.divisible_iters
        runner.optimizer.zero_grad()

    def after_train_iter(self, runner):
        factor = self.cumulative_iters if runner.iter < self.divisible_iters else self.remainder_iters
        (runner.outputs["loss"] / factor).backward()
        if (runner.iter + 1) % self.cumulative_iters == 0 or runner.iter + 1 == runner.max_iters:
            runner.optimizer.step()
            runner.optimizer.zero_grad()


class CheckpointHook:
    def after_train_iter(self, runner):
        if (runner.iter + 1) % runner.interval == 0:
            runner.save_checkpoint(runner.work_dir / f"iter_{runner.iter + 1}.pth")


class EvalHook:
    def __init__(self, loader):
        self.loader = loader

    @torch.no_grad()
    def after_train_iter(self, runner):
        if (runner.iter + 1) % runner.interval and runner.iter + 1 != runner.max_iters:
            return
        runner.model.eval()
        scores = torch.cat([runner.model(images) for images, _ in self.loader])
        labels = self.loader.dataset.tensors[1]
        loss, accuracy = F.cross_entropy(scores, labels), 100 * (scores.argmax(1) == labels).to(scores).mean()
        print(f"Iter(val) [{runner.iter + 1}] accuracy_top-1: {accuracy:.4f}, loss: {loss:.6f}")


class IterBasedRunner:
    def __init__(self, model, optimizer, max_iters, interval, work_dir):
        self.model, self.optimizer, self.work_dir = model, optimizer, Path(work_dir)
        self.max_iters, self.interval = max_iters, interval
        self.iter, self.hooks = 0, []

    def call_hook(self, name):
        for hook in self.hooks:
            if hasattr(hook, name):
                getattr(hook, name)(self)

    def save_checkpoint(self, path):
        meta = {"iter": self.iter + 1}
        torch.save({"meta": meta, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def resume(self, path):
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.iter = checkpoint["meta"]["iter"]

    def run(self, loader):
        self.call_hook("before_run")
        for images, labels in loader:
            self.model.train()
            self.outputs = {"loss": F.cross_entropy(self.model(images), labels)}
            self.call_hook("after_train_iter")
            self.iter += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", default="work_dirs/toy")
    parser.add_argument("--resume-from")
    parser.add_argument("--max-iters", type=int, default=98)
    parser.add_argument("--samples-per-gpu", type=int, default=6)
    parser.add_argument("--val-samples-per-gpu", type=int, default=32)
    parser.add_argument("--cumulative-iters", type=int, default=4)
    parser.add_argument("--interval", type=int, default=24, help="of checkpoints and evaluations, in iterations")
    args = parser.parse_args()
    num_samples = args.max_iters * args.samples_per_gpu

    torch.manual_seed(SEED)
    Path(args.work_dir).mkdir(parents=True, exist_ok=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    runner = IterBasedRunner(model, optimizer, args.max_iters, args.interval, args.work_dir)
    runner.hooks = [
        GradientCumulativeOptimizerHook(args.cumulative_iters),
        CheckpointHook(),
        EvalHook(DataLoader(toy_images(96, seed=2), batch_size=args.val_samples_per_gpu)),
    ]
    dataset = toy_images(144, seed=1)
    sampler = IterSampler(len(dataset), num_samples, seed=SEED)
    if args.resume_from:
        runner.resume(args.resume_from)
        sampler.start = runner.iter * args.samples_per_gpu
    runner.run(DataLoader(dataset, args.samples_per_gpu, sampler=sampler))


if __name__ == "__main__":
    main()
