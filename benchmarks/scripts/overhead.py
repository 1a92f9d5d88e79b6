"""A step of `fit` beside one of a plain PyTorch loop: `python benchmarks/scripts/overhead.py OUTPUT [FLAGS of fit]`.

One training by the Trainer and one of a copy of its network in plain PyTorch take turns in one process, because
machines differ and are noisy.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from lit_cifar.cli.main import main as lit_cifar
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.data.synthetic import MAX_IMAGES
from lit_cifar.models.compiled import Compiled
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optim import WarmupDecay
from lit_cifar.tools.terminal import about

_MANY = 10**6  # more optimizer steps than any training here takes
_SKIPPED = 2  # turns at the start that are not timed


def main() -> None:
    options, flags = parser().parse_known_args()
    steps, batch_size, turns = options.steps, options.batch_size, options.turns + _SKIPPED
    of_epoch = max(1, min(turns, (MAX_IMAGES["train"] // batch_size - 1) // steps))
    words = ["--trainer.devices=1", "--data.dataset=synthetic", "--data.val_size=0", f"--data.batch_size={batch_size}"]
    words += [f"--data.num_train={batch_size * (steps * of_epoch + 1)}", f"--trainer.log_every_n_steps={steps}"]
    words += [f"--trainer.max_epochs={-(-turns // of_epoch)}", *flags]
    words += ["--trainer.callbacks+=overhead.InTurn", f"--trainer.callbacks.steps={steps}"]
    record = about() | {"flags": flags, "steps": steps, "batch_size": batch_size}
    with tempfile.TemporaryDirectory() as folder:
        lit_cifar(["fit", *words, f"--trainer.callbacks.file={folder}/turns.json", f"--run_dir={folder}/run"])
        record["turns"] = json.loads(Path(folder, "turns.json").read_text())[: options.turns]
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    fit_ms, plain_ms = (1e3 * median(turn[which] for turn in record["turns"]) for which in (0, 1))
    low, *_, high = ratios = sorted(fit / plain for fit, plain in record["turns"])
    print(f"{median(ratios):.2f} ({low:.2f} to {high:.2f}, n = {len(ratios)}), {fit_ms:.3g} and {plain_ms:.3g} ms")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("output", type=Path, help="JSON file to write")
    found.add_argument("--turns", type=int, default=5, help="how often each is timed, at least twice (default: 5)")
    found.add_argument("--steps", type=int, default=30, help="steps of a turn (default: 30)")
    found.add_argument("--batch_size", type=int, default=512, help="images of a step (default: 512)")
    return found


class InTurn(Callback):
    """Lets a plain loop of a copy of the network take `steps` steps after as many of the Trainer, and times both.

    An epoch has whole turns, and a step behind them in which it ends. The first two turns are not timed.

    Args:
        file: JSON: for each turn [fit, plain], the seconds of a step.
        steps: Number of steps between two log points, so that each turn has one.
    """

    def __init__(self, file: str, *, steps: int) -> None:
        self.file = Path(file)
        self.steps = steps
        self._plain: PlainLoop | None = None
        self._turns: list[tuple[float, float]] = []
        self._since = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._plain is None:
            self._plain = PlainLoop(deepcopy(pl_module.network), trainer, pl_module)
            self._plain.run(self.steps)
        elif batch_idx and batch_idx % self.steps == 0:
            ours = self._elapsed(pl_module.device)
            self._since = perf_counter()
            self._plain.run(self.steps)
            self._turns.append((ours, self._elapsed(pl_module.device)))
        if batch_idx % self.steps == 0:
            self._since = perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file.write_text(json.dumps(self._turns[_SKIPPED:]))

    def _elapsed(self, device: torch.device) -> float:
        """Seconds of a step of this turn; waits for the device."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (perf_counter() - self._since) / self.steps


class PlainLoop:
    """Trains `network` like the Trainer trains `module`: with its data, optimizer, schedule, precision and layout.

    Loss and accuracy are summed on the device, and read wherever the Trainer logs.
    """

    def __init__(self, network: nn.Module, trainer: Any, module: LitResNet) -> None:
        self.network = network.train()
        self._forward = Compiled(network, cuda_graphs=module.cuda_graphs) if module.compiles else network
        self._layout = torch.channels_last if module.channels_last else torch.contiguous_format
        self._precision = trainer.precision_plugin.forward_context
        self.optimizer = module.optimization.make_optimizer(network.parameters())
        self.scheduler: Any = module.optimization.make_lr_scheduler(self.optimizer)
        if isinstance(self.scheduler, WarmupDecay):
            self.scheduler.set_total_steps(_MANY)
        self.log_every_n_steps = trainer.log_every_n_steps
        self.logged: list[tuple[float, float]] = []  # mean loss and accuracy since the beginning
        self._batches = _forever(trainer.datamodule)
        device, source = next(network.parameters()).device, trainer.datamodule.source
        self._mean, self._std = (
            255 * torch.tensor(each, device=device)[:, None, None] for each in (source.mean, source.std)
        )
        self._smoothing = module.label_smoothing
        self._loss = torch.zeros((), device=device)
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._images = self._steps = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step(next(self._batches))

    def _step(self, batch: Batch) -> None:
        device = self._mean.device
        images = batch.images.to(device, torch.float32, non_blocking=True).sub_(self._mean).div_(self._std)
        labels = batch.labels.to(device, non_blocking=True)
        self.optimizer.zero_grad()  # CUDA graphs need this before the forward pass
        with self._precision():
            logits = self._forward(images.contiguous(memory_format=self._layout))
            loss = F.cross_entropy(logits, labels, label_smoothing=self._smoothing)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self._loss += loss.detach() * len(labels)
        self._right += (logits.detach().argmax(dim=1) == labels).sum()
        self._images += len(labels)
        self._steps += 1
        if self._steps % self.log_every_n_steps == 0:
            self.logged.append((float(self._loss) / self._images, int(self._right) / self._images))


def _forever(data: CIFAR10DataModule) -> Iterator[Batch]:
    while True:
        yield from data.train_dataloader()


if __name__ == "__main__":
    main()
