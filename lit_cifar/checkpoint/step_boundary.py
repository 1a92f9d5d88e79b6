"""Ranks agree between optimizer steps whether to save, to stop, or to abort on a loss that is not finite.

Between two optimizer steps everything that belongs to the first is done, including validation, and nothing of the
second has begun. A checkpoint written there holds exactly the state of an uninterrupted run.
"""

import math
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import group
from torch.nn.utils import get_total_norm

from lit_cifar.checkpoint.callbacks import LastCheckpoint, files_of, settle
from lit_cifar.data.images import Batch
from lit_cifar.errors import Stopped, printable
from lit_cifar.launch.signals import EXIT_STOPPED, Keystrokes

_MAX_IDS = 64
_MAX_STEPS = 1000  # between two agreements, however short they are


class StepBoundary(Callback):
    """Saves when a checkpoint is due, stops when asked to, and stops when a loss is not a finite number.

    SIGTERM, or SIGINT once, makes all processes save at the same step and exit with status 143. A second SIGINT, at
    least a second later, ends the process that receives it at once. A loss that is not finite makes all processes exit
    with status 1, before anything is saved.

    To agree takes an all-reduce, and on a GPU the host waits for it. It is therefore not done at every step. It is done
    about every `agree_every_s` seconds, after a number of steps that the processes also agree on, and when a checkpoint
    is due by its step, which all processes know. Until then a process keeps its losses on its device.

    This callback must come before those that use the next batch, because it acts when that has been fetched.

    Args:
        agree_every_s: Seconds between two agreements, approximately; 0 for one at every step.
    """

    def __init__(self, *, agree_every_s: float = 1.0) -> None:
        self.agree_every_s = agree_every_s
        self._last: LastCheckpoint | None = None
        self._signal = 0
        self._keystrokes = Keystrokes()
        self._losses: list[tuple[int, Tensor, Tensor]] = []  # step, loss and samples since the last agreement
        self._device = torch.device("cpu")
        self._steps_left = 0
        self._asked_at = 0.0
        self._asked_step = 0
        self._step_s = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handling of signals, which synchronises at every step and has no exit status."""
        self._signal, self._keystrokes = 0, Keystrokes()
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is threading.main_thread():
            # Lightning would register its handlers next. They are registered now, so that its teardown restores the
            # former ones.
            trainer._signal_connector.register_signal_handlers()
            trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
            signal.signal(signal.SIGTERM, self._note)
            signal.signal(signal.SIGINT, self._note)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = next((c for c in trainer.callbacks if isinstance(c, LastCheckpoint)), None)  # type: ignore[attr-defined]
        self._losses.clear()
        self._device = pl_module.device
        self._steps_left = 2  # the first agreement comes after a step, when the duration of one is known
        self._asked_at, self._asked_step, self._step_s = time.monotonic(), trainer.global_step, 0.0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._keystrokes.insist(number):
            raise KeyboardInterrupt
        self._signal = number

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Between two optimizer steps: agree if that is due, then save, then stop."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        by_step = self._last is not None and self._last.due_by_step(trainer)
        self._steps_left -= 1
        if self._steps_left > 0 and not by_step:
            return
        number, due = self._agree(trainer)
        if self._last is not None and (by_step or due or number):
            self._check_weights(trainer, pl_module)
            self._last.save(trainer)
        if number:
            message = f"stopped by {signal.Signals(number).name} after {trainer.global_step} optimizer steps"
            remedy = "to resume, run the same command with --resume=auto"
            self._stop(trainer, message, remedy=remedy, status=EXIT_STOPPED)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Keep the loss on its device until the next agreement."""
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        self._losses.append((trainer.global_step - stepped, outputs["loss"].detach(), batch.ids))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop a diverged run before validation, which could make it the best checkpoint."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._check_finite(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop a diverged run before the last checkpoint is saved."""
        self._check_finite(trainer, pl_module)

    def _check_finite(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agree(trainer)
        self._check_weights(trainer, pl_module)

    def _check_weights(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if a weight is not finite, which a step with a finite loss can cause, before that is saved."""
        weights = [part for parameter in pl_module.parameters() if (part := _local(parameter)).numel()]
        largest = get_total_norm(weights, norm_type=math.inf)  # one number for all weights, over all processes
        bad = largest.isfinite().logical_not().to(self._device, torch.float64)
        if trainer.strategy.reduce(bad, group=group.WORLD, reduce_op="max").item():
            message = f"the weights are not finite after {trainer.global_step} optimizer steps"
            self._stop(trainer, message, remedy=_cause(trainer, trainer.global_step), status=1)

    def _agree(self, trainer: Trainer) -> tuple[int, bool]:
        """The number of a signal that any process got, else 0; and whether a checkpoint is due by the clock.

        Processes agree by an all-reduce of maxima, also on the steps until the next one. A loss may stop them here.
        """
        now = time.monotonic()
        if trainer.global_step > self._asked_step:
            self._step_s = (now - self._asked_at) / (trainer.global_step - self._asked_step)
        # The next save reports that one has failed, so it is due.
        due = self._last is not None and (self._last.due_by_time(now) or files_of(trainer).failure is not None)
        own = torch.tensor([self._signal, due, self._step_s, -math.inf], dtype=torch.float64).to(self._device)
        if self._losses:
            own[3] = self._first_bad(trainer)
        largest = trainer.strategy.reduce(own, group=group.WORLD, reduce_op="max").tolist()
        self._asked_at, self._asked_step = time.monotonic(), trainer.global_step
        self._steps_left = min(max(1, round(self.agree_every_s / max(largest[2], 1e-6))), _MAX_STEPS)
        if not math.isinf(largest[3]):
            self._stop_for_loss(trainer, *divmod(round(-largest[3]), trainer.world_size))
        self._losses.clear()
        return int(largest[0]), bool(largest[1])

    def _first_bad(self, trainer: Trainer) -> Tensor:
        """A code of this process's first step with a non-finite loss, larger for earlier steps; -inf for none."""
        steps, losses, _ = zip(*self._losses, strict=True)
        codes = [-float(step * trainer.world_size + trainer.global_rank) for step in steps]
        finite = torch.stack(losses).isfinite().to(self._device)
        return torch.tensor(codes, dtype=torch.float64).to(self._device).masked_fill(finite, -math.inf).max()

    def _stop_for_loss(self, trainer: Trainer, step: int, rank: int) -> NoReturn:
        own = [id_ for of_step, _, ids in self._losses if of_step == step for id_ in ids.tolist()]
        ids = trainer.strategy.broadcast(own, src=rank)
        more = f" and {len(ids) - _MAX_IDS} more" if len(ids) > _MAX_IDS else ""
        samples = ", ".join(map(str, ids[:_MAX_IDS])) + more
        message = (
            f"the loss of rank {rank} is not finite in optimizer step {step} (counted from 0); its samples: {samples}"
        )
        self._stop(trainer, message, remedy=_cause(trainer, step), status=1)

    def _stop(self, trainer: Trainer, message: str, *, remedy: str, status: int) -> NoReturn:
        settle(trainer)  # before the newest checkpoint is named
        path = self._last.newest if self._last else None
        newest = f"the newest checkpoint is {path}" if path else "there is no checkpoint yet"
        end_together(trainer, f"{message}\n{newest}\n{remedy}", status=status)


def _local(parameter: Tensor) -> Tensor:
    """This process's part of a parameter that may be sharded over processes."""
    to_local = getattr(parameter, "to_local", None)
    return parameter.detach() if to_local is None else to_local().detach()


def _cause(trainer: Trainer, num_steps: int) -> str:
    """Why numbers are not finite after `num_steps` optimizer steps."""
    if not num_steps:
        return "no step had been taken before: look at the images and labels"
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return f"the optimisation has diverged: try a lower --model.optimizer.lr (the learning rate was {rate:.3g})"


def end_together(trainer: Trainer, message: str, *, status: int) -> NoReturn:
    """Print `message` on rank 0, and exit; every process must call this."""
    if trainer.is_global_zero:
        print(printable(f"lit_cifar: {message}", lines=True), file=sys.stderr, flush=True)
    with suppress(Exception):  # rank 0 has printed the reason; the others need not be reachable
        trainer.strategy.barrier("end")
    raise Stopped(0 if _is_watched(trainer) else status)


def _is_watched(trainer: Trainer) -> bool:
    """Whether Lightning's launcher started this process; it kills the user's process when one that it started fails."""
    launched = isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher)
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return launched and isinstance(environment, LightningEnvironment) and trainer.local_rank != 0
