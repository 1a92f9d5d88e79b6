"""`Replay`: a callback for anyone's Lightning training."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_cifar import internals
from lit_cifar.checks.repeated_step.events import UnjudgeableError
from lit_cifar.checks.repeated_step.lightning_view import (
    TrainerView,
    before_step,
    detach,
    has_own_backward,
    load_step_states,
    not_replayed,
    progress_of,
    quiet_copy,
    step_states,
)
from lit_cifar.checks.repeated_step.sharded import is_sharded
from lit_cifar.checks.repeated_step.tensors import device_of
from lit_cifar.checks.repeated_step.twin import Twin, communication_hook, twin_of, what_cannot_be_judged
from lit_cifar.checks.replay.epoch import Epochs
from lit_cifar.checks.replay.recording import Recorder
from lit_cifar.checks.replay.replaying import Replayer, judge
from lit_cifar.checks.replay.states import (
    KEY,
    are_replicas,
    compare_replicas,
    compare_resumed,
    loaded_weights,
    states_of,
    weights_of,
)
from lit_cifar.checks.replay.step_data import JoinedBatch
from lit_cifar.checks.replay.verdict import Report, empty_report
from lit_cifar.mode import mode_of

RESULT = "replay.json"
_AVERAGED = (
    "weights are written other than those that the training goes on from, as averages are: a resume must put the "
    "others back"
)
_NOT_LOADED = "weights are others at the first step than in the checkpoint: something has changed them since"


class ReplayError(RuntimeError):
    """The run did not train the model that one device would train."""


class Replay(Callback):
    """Replays a few steps of a training on one device, in its own precision, and compares.

    Every rank writes down the batches, the random generators' states and the digests of its results. Then rank 0
    repeats each rank's steps in turn: losses, local gradients, buffers, parameters and optimizer states must be equal
    to the last bit; gradients averaged over ranks must lie within a proven bound of the mean. It works with any
    `LightningModule`, automatic or manual optimization, on one device, with `ddp` in all its forms, with FSDP2, and
    with a strategy whose `on_one_device` gives the computation of one device in its place. The samples that each rank
    reads in the first two epochs are compared too, and the logged means of the first evaluation.

    Args:
        steps: Number of optimizer steps to judge.
        at: The steps before which a stretch of such steps begins; between stretches no step is observed.
        stop: End the training when the last of these stretches has been judged.
        raises: End the training with a `ReplayError` where something is wrong.
    """

    def __init__(self, steps: int = 4, *, at: Sequence[int] = (0,), stop: bool = False, raises: bool = False) -> None:
        if steps < 1:
            raise ValueError(f"steps={steps} judges nothing: pass 1 or more")
        self.steps, self.at, self.stop, self.raises = steps, tuple(at), stop, raises
        self.reports: list[Report] = []
        self._window: _Window | None = None
        self._first: int | None = None
        self._judged = 0  # number of windows
        self._epochs: Epochs | None = None
        # Weights of a checkpoint that was written or loaded, until the next step begins; and the note if they differ.
        self._weights: tuple[dict[str, int], str] | None = None
        self._loaded: dict[str, int] | None = None  # weights of a checkpoint that was written without this callback
        self._noted: set[str] = set()
        self._saved: dict[str, Any] | None = None  # entry of the checkpoint that the training began with

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._epochs is not None and _each_rank_holds_all(trainer):
            checkpoint[KEY] = {"states": states_of(trainer)} | self._epochs.position()
            self._weights = (weights_of(pl_module), _AVERAGED) if trainer.state.fn == "fit" else None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(KEY)
        is_early = trainer.state.fn == "fit" and not trainer.strategy.restore_checkpoint_after_setup
        if self._saved is None and is_early and _each_rank_holds_all(trainer):
            self._loaded = loaded_weights(pl_module, checkpoint.get("state_dict", {}))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved is None or self._epochs is None or not _each_rank_holds_all(trainer):
            return
        self._epochs.resumed = self._saved
        report = empty_report(trainer, f"resume at step {trainer.global_step}")
        compare_resumed(report, self._saved["states"], trainer)
        self._saved = None
        self._tell(trainer, trainer.strategy.broadcast(report))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loaded, self._weights, self._loaded = self._loaded, None, None
        if mode_of(trainer.strategy).is_known and not [*internals.missing(internals.REPLAY)]:
            self._weights = (loaded, _NOT_LOADED) if loaded else None
            self._epochs = Epochs(trainer, partial(self._tell, trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._epochs is not None:
            self._epochs.close()
            self._epochs = None

    def writes_down(self, trainer: Trainer) -> bool:
        """Whether the step that begins is, or may be, written down."""
        return self._window is not None or trainer.global_step in self.at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._weights is not None:
            self._compare_with_checkpoint(trainer, pl_module)
        accumulates = batch_idx % trainer.accumulate_grad_batches != 0
        if self._first is None:
            self._first = trainer.global_step
        due = trainer.global_step in self.at or (trainer.global_step == self._first and min(self.at) < self._first)
        if self._window is None and not accumulates and due:
            report = _new_report(trainer, pl_module)
            folder = None if report.abstained else _folder_for_all(trainer, report)
            if folder is None:
                self._tell(trainer, report)
                self._stop_if_done(trainer)
            else:
                self._window = _Window(trainer, pl_module, folder, report)

    def _compare_with_checkpoint(self, trainer: Trainer, module: LightningModule) -> None:
        """Note a checkpoint whose weights are not those of the training, such as averages, which a resume would use."""
        assert self._weights is not None
        now, (saved, text), self._weights = weights_of(module), self._weights, None
        unlike = [name for name, bits in saved.items() if now.get(name, bits) != bits]
        if trainer.strategy.broadcast(bool(unlike)) and text not in self._noted:
            self._noted.add(text)
            report = empty_report(trainer, f"checkpoint of step {trainer.global_step}")
            report.counts["states"] = len(now)
            report.note(f"{len(unlike)} of {len(now)} {text}")
            self._tell(trainer, trainer.strategy.broadcast(report))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is not None and not self._window.mode.has_own_step:
            self._window.recorder.backward_ended()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._epochs is not None:
            self._epochs.batch_ended(batch_idx)
        window = self._window
        if window is not None and trainer.global_step - window.first_step >= self.steps * window.steps_per_count:
            self._judge(trainer, window)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is not None:
            self._judge(trainer, self._window)
        if trainer.world_size > 1 and are_replicas(trainer.strategy.model):
            report = empty_report(trainer, f"replicas after step {trainer.global_step}")
            compare_replicas(report, pl_module)
            self._tell(trainer, trainer.strategy.broadcast(report))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module and its loaders as they were: Lightning calls no `teardown` of a callback then."""
        if self._window is not None:
            self._window.close()
            self._window.remove()
            self._window = None
        self.teardown(trainer, pl_module, "fit")

    def _judge(self, trainer: Trainer, window: "_Window") -> None:
        self._window = None
        report = window.judged()
        if self.stop:
            report.not_looked_at.append("whole epochs and evaluations, as it ends with these steps")
        self._tell(trainer, report)
        self._stop_if_done(trainer)

    def _tell(self, trainer: Trainer, report: Report) -> None:
        """Print a report and write it down; where that fails the training goes on."""
        self.reports.append(report)
        rank_zero_info("\n".join(report.lines()))
        folder = _folder_of(trainer)
        if trainer.is_global_zero:
            try:
                folder.joinpath(RESULT).write_text(json.dumps([each.as_json() for each in self.reports], indent=1))
            except OSError as error:
                rank_zero_warn(f"{RESULT} cannot be written: {error}")
        if self.raises and report.outcome == "fail":
            raise ReplayError("\n".join(report.lines()))

    def _stop_if_done(self, trainer: Trainer) -> None:
        self._judged += 1
        if self.stop and self._judged == len(self.at):
            trainer.should_stop = True


def _told(note: Callable[..., object]) -> Callable[..., None]:
    def hook(self: Replay, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._epochs is not None:
            note(self._epochs, *args)

    return hook


_NOTES: dict[str, Callable[..., object]] = {
    "on_train_epoch_start": Epochs.begin,
    "on_train_epoch_end": Epochs.end,
    "on_sanity_check_end": Epochs.evaluated,
    "on_validation_start": Epochs.begin_evaluation,
    "on_validation_batch_start": Epochs.begin_batch,
    "on_validation_batch_end": lambda epochs, *_: epochs.begin_batch(None),
    "on_validation_end": Epochs.end_evaluation,
}
for _hook, _note in _NOTES.items():
    setattr(Replay, _hook, _told(_note))


class _Window:
    """A stretch of steps that is written down."""

    def __init__(self, trainer: Trainer, module: LightningModule, folder: Path, report: Report) -> None:
        self.trainer, self.module, self.folder, self.report = trainer, module, folder, report
        self.first_step = trainer.global_step
        strategy: Any = trainer.strategy
        self.mode = mode_of(strategy)
        # The trainer counts the steps of all optimizers that manual optimization calls.
        self.steps_per_count = 1 if module.automatic_optimization else max(len(trainer.optimizers), 1)
        self.twin: Twin | None = None
        if trainer.is_global_zero or is_sharded(module):
            self._make_twin()
        self.recorder = Recorder(
            folder,
            rank=trainer.global_rank,
            module=module,
            optimizers=trainer.optimizers,
            is_synced=lambda: self.mode.averages_gradients,
            progress=partial(progress_of, trainer),
            model_parallel_size=self.mode.model_parallel_size,
            copies=self.mode.trained_elsewhere(),
        )
        self._replaced = ExitStack()
        if self.mode.has_own_step:
            step = self.recorder.recorded(self.recorder.unobserved(strategy.training_step))
            end = self.recorder.ended_by(strategy.post_backward)
            self._replaced.enter_context(patch.multiple(strategy, training_step=step, post_backward=end))
        else:
            step = self.recorder.recorded(module.training_step)
            self._replaced.enter_context(patch.object(module, "training_step", step))
        self._replaced.enter_context(patch.object(module, "log", self.recorder.unobserved(module.log)))

    def _make_twin(self) -> None:
        try:
            module, optimizers = twin_of(self.module, self.trainer.optimizers)
        except UnjudgeableError as reason:
            self.report.abstained.append(str(reason))
            return
        self.twin = Twin(
            module,
            optimizers,
            partial(self._step, module) if self.mode.has_own_step else module.training_step,
            is_sharded(self.module),
            hook=communication_hook(self.trainer.strategy.model),
            model_parallel_size=self.mode.model_parallel_size,
            before_step=partial(before_step, module, self.trainer),
            # A mode with its own step is written down when this has been called.
            after_backward=(lambda: None) if self.mode.has_own_step else module.on_after_backward,
        )
        if self.mode.on_one_device is not None:
            module.to(device_of(self.module))
            before = dict(vars(module))
            module.use_forward_fn(self.mode.on_one_device(module.network))  # type: ignore[operator,arg-type]
            self.twin.own = {("", name) for name, value in vars(module).items() if value is not before.get(name)}

    def _step(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        with self.trainer.precision_plugin.train_step_context():
            return module.training_step(*args, **kwargs)

    def close(self) -> None:
        self.recorder.close()
        self._replaced.close()

    def judged(self) -> Report:
        """Judge the record and remove it. Return the same report on every rank."""
        self.close()
        self.trainer.strategy.barrier("replay")
        if self.trainer.is_global_zero:
            now = step_states(self.trainer)
            judge(self.folder, self.twin, self.report, device=device_of(self.module), prepare=self._prepare)
            load_step_states(self.trainer, now)
        self.remove()  # the other ranks wait for this
        report: Report = self.trainer.strategy.broadcast(self.report)
        return report

    def _prepare(self, replayer: Replayer) -> None:
        twin = replayer.twin
        view = TrainerView(self.trainer, twin.optimizers)
        twin.progress = view.follow
        if self.module.automatic_optimization and not has_own_backward(self.module):
            twin.loss_gradient = lambda: view.loss_scale / self.trainer.accumulate_grad_batches
            is_alone = self.trainer.world_size * self.trainer.accumulate_grad_batches == 1
            if not is_alone and not twin.sharded and self.mode.on_one_device is None:
                copied = partial(quiet_copy, view=view, replayer=replayer)
                replayer.joined = JoinedBatch(copied, device_of(self.module))
        detach(twin.module, view, replayer)

    def remove(self) -> None:
        if self.trainer.is_global_zero:
            shutil.rmtree(self.folder, ignore_errors=True)


def _each_rank_holds_all(trainer: Trainer) -> bool:
    return mode_of(trainer.strategy).model_parallel_size == 1 and not is_sharded(trainer.lightning_module)


def _new_report(trainer: Trainer, module: LightningModule) -> Report:
    strategy, report = trainer.strategy, empty_report(trainer)
    if not mode_of(strategy).is_known:
        report.abstained.append(f"{type(strategy).__name__} is not known here: docs/replay.md lists those that are")
    report.abstained += what_cannot_be_judged(module, autocast="mixed" in str(trainer.precision))
    report.abstained += not_replayed(trainer)
    if not module.automatic_optimization and trainer.precision == "16-mixed":
        report.abstained.append("manual optimization with a GradScaler is not replayed: pass precision=bf16-mixed")
    return report


def _folder_of(trainer: Trainer) -> Path:
    """The folder of the run's logs. Every rank must call this."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def _folder_for_all(trainer: Trainer, report: Report) -> Path | None:
    """A folder of rank 0 that only its owner can read; None, and the reason in the report, if it cannot be made."""
    made, root = "", _folder_of(trainer)
    if trainer.is_global_zero:
        try:
            root.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix="replay-", dir=root)
        except OSError as error:
            report.abstained.append(f"there is no place for the record: {error}")
    made, report.abstained = trainer.strategy.broadcast((made, report.abstained))
    return Path(made) if made else None
