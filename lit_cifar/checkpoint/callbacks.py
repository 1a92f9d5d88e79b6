"""Saving: the best checkpoint by validation accuracy, the last two, and the agreement of ranks between steps.

Between two optimizer steps everything that belongs to the first is done, including validation, and nothing of the
second has begun. A checkpoint written there holds exactly the state of an uninterrupted run.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import group
from torch.nn.utils import get_total_norm

from lit_cifar.checkpoint.atomic import BEST, LAST
from lit_cifar.checkpoint.files import CheckpointFiles
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.data.images import Batch
from lit_cifar.errors import CheckpointError, bounded
from lit_cifar.launch.signals import EXIT_STOPPED, Keystrokes, end_together, stop_signals
from lit_cifar.mode.tensors import local_part
from lit_cifar.reporting.run_folder import SELDOM_S, run_folder

_MAX_IDS = 64
_MAX_STEPS = 1000  # most steps between two agreements


def settle(trainer: Trainer, *, wait: bool = True) -> None:
    """Return when every checkpoint is on disk; without `wait` at once, unless one is known to have failed.

    Every process must call this: if rank 0 cannot write one, each raises that, and none waits for it at a barrier. With
    a `CheckpointIO` other than ours only rank 0 raises, if at all.
    """
    files = files_of(trainer)
    if wait or files.failure is not None:
        files.wait()
    failure: CheckpointError | None = trainer.strategy.broadcast(files.failure)
    if failure is not None:
        files.failure = None
        raise failure


@contextmanager
def saving_behind(trainer: Trainer) -> Iterator[None]:
    """Let the training go on while what is saved inside is written; each process must enter this, as `settle`."""
    files = files_of(trainer)
    files.behind = True
    try:
        yield
    finally:
        files.behind = False
    settle(trainer, wait=False)


def files_of(trainer: Trainer) -> CheckpointFiles:
    """The plugin that writes checkpoints; for a Trainer whose plugin is not ours, one with nothing to write."""
    files = trainer.strategy.checkpoint_io
    return files if isinstance(files, CheckpointFiles) else CheckpointFiles()


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint by `val/acc`, `best.ckpt`; none without validation images (`--data.val_size=0`).

    Args:
        monitor: Logged metric that ranks the checkpoints.
        mode: Whether the maximum or the minimum of the metric is best.
    """

    def __init__(self, *, monitor: str = "val/acc", mode: Literal["min", "max"] = "max") -> None:
        super().__init__(
            filename=Path(BEST).stem,
            monitor=monitor,
            mode=mode,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=monitor.startswith("train/") or None,  # at a validation it is that of before
            enable_version_counter=False,  # a resumed run may not know the best file yet, and then replaces it
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Recognise the run's best file in a folder of another name, with which Lightning would forget it."""
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            return
        scores = {self._here(path): score for path, score in state["best_k_models"].items()}
        there = [Path(path) for path in scores if Path(path).exists()]
        is_later = any(_step_of(path) > checkpoint["global_step"] for path in there)
        if trainer.strategy.broadcast(len(there) == len(scores) and not is_later):
            paths = {key: self._here(state[key]) for key in ("best_model_path", "kth_best_model_path")}
            state |= {"dirpath": self.dirpath, "best_k_models": scores, **paths}
        else:  # lost, or of steps that are taken again, perhaps otherwise: the next validation writes it
            del checkpoint["callbacks"][self.state_key]

    def _here(self, path: str) -> str:
        return path and str(Path(self.dirpath or "") / Path(path).name)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Save, unless there was no validation, such as when `max_steps` ends the run before the first one."""
        if self.monitor in monitor_candidates or trainer.fit_loop.epoch_loop.val_loop._has_run:
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        idle = (Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint)
        uploads = any(type(logger).after_save_checkpoint not in idle for logger in trainer.loggers)
        with nullcontext() if uploads else saving_behind(trainer):  # what is uploaded must be complete
            super()._save_checkpoint(trainer, filepath)


def _step_of(path: Path) -> float:
    """The optimizer steps behind a checkpoint, infinite for one that cannot be read."""
    with suppress(CheckpointError):
        return int(read_checkpoint(path, mapped=True)["global_step"])
    return math.inf


class LastCheckpoint(callbacks.Checkpoint):
    """Keeps the checkpoint that a run resumes from, `last.ckpt`, and the one before it, `previous.ckpt`.

    This callback says when a checkpoint is due. `StepBoundary` calls `save` once all processes have agreed, at the
    start of an optimizer step. The end of training is always saved. Nothing is due before the first step of a run.

    Args:
        every_n_epochs: Save after every n epochs. With null after each that ends 30 seconds or more after the last
            checkpoint. With 0 the number of epochs is no reason to save.
        every_n_steps: Save after every n optimizer steps. With null the number of steps is no reason to save.
    """

    def __init__(self, *, every_n_epochs: int | None = None, every_n_steps: int | None = None) -> None:
        super().__init__()
        self.every_n_epochs = bounded("--last_checkpoint.every_n_epochs", every_n_epochs, 0)
        self.every_n_steps = bounded("--last_checkpoint.every_n_steps", every_n_steps, 1)
        # The file that this run saved last, complete after `settle`, or the one it was resumed from.
        self.newest: Path | None = None
        self._end_of_epochs: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder = (run_folder(trainer) or Path(trainer.default_root_dir)) / "checkpoints"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting: at the start of a run, resumed or not, there is nothing new to save."""
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self.newest = Path(trainer.ckpt_path) if trainer.ckpt_path else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs != 0 and trainer.current_epoch % (self.every_n_epochs or 1) == 0:
            self._end_of_epochs = trainer.global_step

    def due_by_step(self, trainer: Trainer) -> bool:
        """Whether a checkpoint is due by the number of steps or epochs; the same on every process."""
        step = trainer.global_step
        by_epochs = self.every_n_epochs is not None and step == self._end_of_epochs
        by_steps = self.every_n_steps is not None and step % self.every_n_steps == 0
        return step != self._saved_step and (by_epochs or by_steps)

    def due_by_time(self, trainer: Trainer, now: float) -> bool:
        """Whether a checkpoint is due by the clock, `time.monotonic()`; processes may differ."""
        is_end = self.every_n_epochs is None and trainer.global_step == self._end_of_epochs
        return is_end and now - self._saved_at >= SELDOM_S

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint, but not in a `fast_dev_run`; every process must call this. See `settle`."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        with saving_behind(trainer):
            trainer.save_checkpoint(self._folder / LAST)
        self.newest = self._folder / LAST
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of training, unless that was done, and wait for the files."""
        if self.newest != self._folder / LAST or self._saved_step != trainer.global_step:
            self.save(trainer)
        settle(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait for the files, before an error lists them. Lightning skips the teardown if a logger fails as well."""
        files_of(trainer).wait()


class StepBoundary(Callback):
    """Saves when a checkpoint is due, stops when asked to, and stops when a loss is not a finite number.

    SIGTERM, SIGHUP, or SIGINT once, makes all processes save at the same step and exit with status 143. A second
    SIGINT, a second later or more, ends the process that gets it at once. A non-finite loss ends all with 1, unsaved.

    To agree takes an all-reduce, for which the host waits. It is done about every `agree_every_s` seconds, after a
    number of steps that they agree on too, and when a checkpoint is due by its step. Else losses stay on the device.

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
        self._steps_left = self._asked_step = 0
        self._asked_at = self._step_s = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handling of signals, which synchronises at every step and has no exit status."""
        self._signal, self._keystrokes = 0, Keystrokes()
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is threading.main_thread():
            # Lightning would register its handlers next. Done now, so that its teardown restores the former ones.
            trainer._signal_connector.register_signal_handlers()
            trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
            for number in stop_signals():
                signal.signal(number, self._note)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # held back where this process was spawned

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = next((c for c in trainer.callbacks if isinstance(c, LastCheckpoint)), None)  # type: ignore[attr-defined]
        self._losses.clear()
        self._device = pl_module.device
        self._steps_left = 2  # the first agreement comes after a step, when the duration of one is known
        self._asked_at, self._asked_step, self._step_s = time.monotonic(), trainer.global_step, 0.0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps_left = 1  # clocks say whether it is saved

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._keystrokes.insist(number):
            raise KeyboardInterrupt
        self._signal = number

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Agree if that is due, then save, then stop, between two optimizer steps."""
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

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        self._losses.append((trainer.global_step - stepped, outputs["loss"].detach(), batch.ids))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop a diverged run before validation, which could make it the best checkpoint."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop a diverged run before the last checkpoint is saved."""
        self._agree(trainer)
        self._check_weights(trainer, pl_module)

    def _check_weights(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if a weight is not finite, which a step with a finite loss can cause, before that is saved."""
        weights = [p for its in pl_module.parameters() if its.requires_grad and (p := local_part(its).detach()).numel()]
        largest = get_total_norm(weights, norm_type=math.inf)  # one number for all weights, over all processes
        bad = largest.isfinite().logical_not().to(self._device, torch.float64)
        if trainer.strategy.reduce(bad, group=group.WORLD, reduce_op="max").item():
            message = f"the weights are not finite after {trainer.global_step} optimizer steps"
            self._stop(trainer, message, remedy=_cause(trainer, trainer.global_step), status=1)

    def _agree(self, trainer: Trainer) -> tuple[int, bool]:
        """The number of a signal that any process got, else 0; whether a save is due. A loss may stop them here."""
        now = time.monotonic()
        if trainer.global_step > self._asked_step:
            self._step_s = (now - self._asked_at) / (trainer.global_step - self._asked_step)
        # The next save reports that one has failed, so it is due.
        due = self._last is not None and (self._last.due_by_time(trainer, now) or files_of(trainer).failure is not None)
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
        where = f"the loss of rank {rank} is not finite in optimizer step {step} (counted from 0)"
        self._stop(trainer, f"{where}; its samples: {samples}", remedy=_cause(trainer, step), status=1)

    def _stop(self, trainer: Trainer, message: str, *, remedy: str, status: int) -> NoReturn:
        settle(trainer)  # the newest checkpoint is named below
        path = self._last.newest if self._last else None
        newest = f"the newest checkpoint is {path}" if path else "there is no checkpoint yet"
        end_together(trainer, f"{message}\n{newest}\n{remedy}", status=status)


def _cause(trainer: Trainer, num_steps: int) -> str:
    """The likely reason for numbers that are not finite after `num_steps` optimizer steps."""
    if not num_steps:
        return "no step had been taken before: look at the images and labels"
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return f"the optimisation has diverged: try a lower --model.optimizer.lr (the learning rate was {rate:.3g})"
