"""One trunk and a head for each of three tasks: every step takes a micro-batch of each task.

python project.py --batch_size 8
"""

import argparse
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TASKS = ("depth", "normal", "curvature")


class MultiTaskModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict(
            {task: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)) for task in TASKS}
        )

    def forward(self, inputs, task):
        return self.heads[task](self.trunk(inputs))[:, 0]


class DataParallel(nn.Module):
    """A copy of the module on each rank; gradients of parameters that some rank has used are averaged."""

    def __init__(self, module):
        super().__init__()
        self.module, self.synchronise, self.used = module, True, set()
        for name, parameter in module.named_parameters():
            dist.broadcast(parameter.detach(), 0)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.used.add(name))

    def forward(self, *inputs):
        if BUG:
            self.used.clear()
        return self.module(*inputs)

    @contextmanager
    def no_sync(self):
        self.synchronise = False
        yield
        self.synchronise = True

    def backward(self, loss):
        loss.backward()
        if self.synchronise:
            self._reduce()

    def _reduce(self):
        parameters = dict(self.module.named_parameters())
        used = torch.tensor([int(name in self.used) for name in parameters])
        dist.all_reduce(used)
        for parameter, count in zip(parameters.values(), used.tolist(), strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient)
                parameter.grad = gradient / dist.get_world_size()
        self.used.clear()


def make_task(task, count, seed):
    generator = torch.Generator().manual_seed(seed + TASKS.index(task))
    inputs = torch.randn(count, 10, generator=generator)
    latent = inputs[:, :3].square().sum(1).sqrt()
    targets = {
        "depth": latent,
        "normal": inputs[:, 3] * latent.cos(),
        "curvature": (inputs[:, 4] + latent).sin(),
    }[task]
    return TensorDataset(inputs, targets + 0.05 * torch.randn(count, generator=generator))


class Trainer:
    def __init__(self, args, rank):
        self.args, self.rank = args, rank
        torch.manual_seed(SEED)
        self.model = DataParallel(MultiTaskModel())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.samplers, self.loaders = [], []
        for task in TASKS:
            dataset = make_task(task, 160, seed=10)
            sampler = DistributedSampler(dataset, shuffle=True, seed=SEED, drop_last=True)
            self.samplers.append(sampler)
            self.loaders.append(DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True))
        self.val_sets = {task: make_task(task, 70, seed=20) for task in TASKS}

    def sync_context(self, is_last):
        # no communication until the last micro-batch of the step
        return nullcontext() if is_last else self.model.no_sync()

    def train_step(self, micro_batches):
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for index, (task, (inputs, targets)) in enumerate(zip(TASKS, micro_batches, strict=True)):
            with self.sync_context(index == len(TASKS) - 1):
                loss = F.mse_loss(self.model(inputs, task), targets) / len(TASKS)
                self.model.backward(loss)
            total += loss.detach()
        self.optimizer.step()
        return total

    def fit(self):
        for epoch in range(self.args.epochs):
            for sampler in self.samplers:
                sampler.set_epoch(epoch)
            losses = [self.train_step(micro_batches) for micro_batches in zip(*self.loaders, strict=True)]
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            if self.rank == 0:
                errors = self.validate()
                line = " ".join(f"{task} {error:.5f}" for task, error in errors.items())
                print(f"epoch {epoch + 1}: loss {mean.item() / dist.get_world_size():.5f} rmse {line}", flush=True)

    @torch.no_grad()
    def validate(self):
        model = self.model.module
        errors = {}
        for task, dataset in self.val_sets.items():
            squares = 0.0
            for inputs, targets in DataLoader(dataset, self.args.val_batch_size):
                squares += (model(inputs, task) - targets).square().sum().item()
            errors[task] = (squares / len(dataset)) ** 0.5
        return errors


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=10, help="of each task and process")
    parser.add_argument("--val_batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    Trainer(parser.parse_args(), rank).fit()


if __name__ == "__main__":
    spawn(main, 2)
