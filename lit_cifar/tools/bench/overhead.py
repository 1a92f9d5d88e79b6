"""The time that `fit` adds to a step: one training by the Trainer and in plain PyTorch, in turn in one process."""

import json
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from os import sched_getaffinity
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar import internals
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.data.synthetic import MAX_IMAGES
from lit_cifar.models.compiled import Compiled
from lit_cifar.models.resnet import SHAPES, BasicBlock, TinyResNet
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optim import WarmupDecay
from lit_cifar.tools.bench import Row, Settings, Values, fit

_MANY = 10**6  # more optimizer steps than any training here takes
_SKIPPED = 2  # turns at the start that are not timed
_LAYOUT = ["--trainer.precision=bf16-mixed", "--model.channels_last=true"]  # a usual layout on a GPU
OPTIMIZERS = {"SGD": [], "Muon": ["--model.optimizer=lit_cifar.MuonSGD", "--model.label_smoothing=0.2"]}


def measure(settings: Settings) -> list[Row]:
    """A step with all that a run logs by default, over one of a plain loop in the same precision and layout."""
    # A tiny network: the step is all that is not the network.
    turns = (1 if settings.small else 6) * settings.rounds
    ours, plain, _ = _in_turn(settings, [f"--model.network={__name__}.Small"], turns=turns, steps=50, batch_size=16)
    name = "a step of fit, with all logs, over a plain PyTorch loop, a network of one layer"
    rows = [Row(name, "us", 1e6 * (ours - plain), f"the plain loop takes {1e6 * np.median(plain):,.0f} us a step")]
    # A thin network: the step is the host's work.
    for name, flags in OPTIMIZERS.items():
        flags = [f"--model.network={__name__}.Thin", *_LAYOUT, *flags]
        ours, plain, counts = _in_turn(settings, flags, turns=turns, steps=20, batch_size=8)
        about = f"thin ResNet34, {name}"
        note = f"the plain loop takes {1e3 * np.median(plain):,.1f} ms a step"
        rows.append(Row(f"time of a step of fit over that of a plain loop, {about}", "x", ours / plain, note))
        for what, (of_fit, of_plain) in counts.items():
            note, ratio = f"{of_fit:,} between two steps of fit, {of_plain:,} in the plain loop", of_fit / of_plain
            rows.append(Row(f"{what} of fit over those of a plain loop, {about}", "x", np.array([ratio]), note))
    # A real network: the time that a user pays.
    on_gpu = torch.cuda.is_available()
    stem, batch_size, precision = ("cifar", 512, "bf16-mixed") if on_gpu else ("imagenet", 128, "32-true")
    flags = [f"--model.arch={settings.arch}", f"--model.stem={stem}", f"--trainer.precision={precision}"]
    flags.append(f"--model.channels_last={str(on_gpu).lower()}")
    steps, threads = 30 if on_gpu else 3, len(sched_getaffinity(0))
    # On a CPU a network of this size takes minutes to compile.
    for compiled in (False, True) if on_gpu else (False,):
        sizes = {"turns": settings.rounds, "steps": steps, "batch_size": batch_size, "threads": threads}
        ours, plain, _ = _in_turn(settings, [*flags, f"--model.compile={str(compiled).lower()}"], **sizes)
        about = f"{stem} stem, batch {batch_size}, {precision}, {'channels_last' if on_gpu else 'contiguous'}"
        name = f"time of a step of fit over that of a plain loop, ResNet34, {about}{', compiled' * compiled}"
        note = f"the plain loop takes {1e3 * np.median(plain):,.3g} ms a step"
        rows.append(Row(name, "x", ours / plain, note))
    return rows


def _in_turn(
    settings: Settings, flags: list[str], *, turns: int, steps: int, batch_size: int, threads: int = 1
) -> tuple[Values, Values, dict[str, list[int]]]:
    """Seconds of a step of `fit` and of the plain loop, for each turn; and what `COUNTERS` count in each."""
    of_epoch = min(turns + _SKIPPED, (MAX_IMAGES["train"] // batch_size - 1) // steps)  # turns
    folder = Path(tempfile.mkdtemp(prefix="overhead-", dir=settings.folder))
    words = [f"--trainer.accelerator={'gpu' if torch.cuda.is_available() else 'cpu'}", "--trainer.devices=1", *flags]
    words += [f"--trainer.max_epochs={-(-(turns + _SKIPPED) // of_epoch)}", f"--trainer.log_every_n_steps={steps}"]
    words += ["--data.dataset=synthetic", "--data.val_size=0", f"--data.batch_size={batch_size}"]
    words += [f"--data.num_train={batch_size * (steps * of_epoch + 1)}"]
    words += [f"--trainer.callbacks+={__name__}.InTurn", f"--trainer.callbacks.steps={steps}"]
    words += [f"--trainer.callbacks.file={folder / 'turns'}", f"--run_dir={folder / 'run'}"]
    fit(words, folder=folder, threads=threads)
    found = json.loads((folder / "turns").read_text())
    of_fit, of_plain = np.array(found["turns"][:turns]).T
    return of_fit, of_plain, found["counts"]


class Small(nn.Sequential):
    """A network that takes so little time that a step is all bookkeeping."""

    def __init__(self) -> None:
        super().__init__(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 10))


class Thin(nn.Module):
    """The layers of ResNet34 with an eighth of the channels, on few pixels: a step is all work of the host.

    It names no blocks, so that no random stream is set before each of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = TinyResNet(BasicBlock, [*SHAPES["resnet34"].num_blocks], num_classes=10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class Operators(internals.TorchDispatchMode):  # type: ignore[misc]
    """Counts what torch dispatches in this thread, on a CPU backward too; one of several tensors counts once."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class PythonCalls:
    count = 0

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call"


COUNTERS: dict[str, Any] = {"operators": Operators, "calls of Python": PythonCalls}


class InTurn(Callback):
    """Lets a plain loop of a copy of the network take `steps` steps after as many of the Trainer, and times both.

    An epoch has whole turns, and a step behind them in which it ends. The first two turns are not timed: in the second
    some steps are counted, one by each of `COUNTERS`.

    Args:
        file: JSON: `turns`, for each turn [fit, plain], the seconds of a step, and `counts`.
        steps: Number of steps between two log points, so that each turn has one.
    """

    def __init__(self, file: str, *, steps: int) -> None:
        self.file = Path(file)
        self.steps = steps
        self._plain: PlainLoop | None = None
        self._turns: list[tuple[float, float]] = []
        self._since = 0.0
        self._counters, self._plain_counters = ([make() for make in COUNTERS.values()] for _ in range(2))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = batch_idx - self.steps if trainer.current_epoch == 0 else -1  # of the second turn
        if 0 < step <= len(COUNTERS):
            self._counters[step - 1].__exit__(None, None, None)
        if self._plain is None:
            self._plain = PlainLoop(deepcopy(pl_module.network), trainer, pl_module)
            self._plain.run(self.steps - len(COUNTERS))
            for counter in self._plain_counters:
                with counter:
                    self._plain.run(1)
        elif batch_idx and batch_idx % self.steps == 0:
            ours = self._elapsed(pl_module.device)
            self._since = perf_counter()
            self._plain.run(self.steps)
            self._turns.append((ours, self._elapsed(pl_module.device)))
        if batch_idx % self.steps == 0:
            self._since = perf_counter()
        if 0 <= step < len(COUNTERS):
            self._counters[step].__enter__()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        both = zip(COUNTERS, self._counters, self._plain_counters, strict=True)
        counts = {name: [ours.count, plain.count] for name, ours, plain in both}
        self.file.write_text(json.dumps({"turns": self._turns[_SKIPPED:], "counts": counts}))

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
        self.optimizer = module.make_optimizer(network.parameters())
        self.scheduler: Any = module.make_lr_scheduler(self.optimizer)
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
        loss.backward()  # type: ignore[no-untyped-call]
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
