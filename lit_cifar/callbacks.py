"""The callbacks of every run, and the order in which they are called."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_cifar.checkpoint.callbacks import BestCheckpoint, LastCheckpoint, StepBoundary
from lit_cifar.checkpoint.exact_resume import ExactResume, SameStart
from lit_cifar.checkpoint.sample_audit import SampleAudit
from lit_cifar.launch.malloc_tuning import KeepFreedMemory
from lit_cifar.models.random_streams import RandomStreams
from lit_cifar.reporting.evaluation_tables import ConfusionCounts, PerRankAccuracy, PredictionWriter
from lit_cifar.reporting.progress import Throughput
from lit_cifar.reporting.run_report import RunReport
from lit_cifar.task.metrics import EpochMeans
from lit_cifar.watchdog.callback import Watchdog

_IN_EVERY_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def default_callbacks() -> list[Callback]:
    """The callbacks of every run; `--trainer.callbacks` adds to them."""
    return [
        EpochMeans(),
        KeepFreedMemory(),
        StepBoundary(),
        RandomStreams(),
        ExactResume(),
        SampleAudit(),
        LearningRateMonitor(logging_interval="step"),  # logged with the other metrics of a step
        Throughput(),
        PerRankAccuracy(),
        ConfusionCounts(),
        PredictionWriter(),
        RunReport(),
    ]


def place(callback: Callback) -> int:
    """Sort key of callbacks: `StepBoundary`, then the watchdog, which notes phases, then `EpochMeans`, then all others.

    `SameStart` comes before them: it ends runs whose processes would differ in what follows. Callbacks that save come
    last, because their state must be the last to change. Ours come before other checkpoint callbacks, because the run's
    summary names the first one's files.
    """
    kinds: tuple[Any, ...] = (SameStart, StepBoundary, Watchdog, EpochMeans, BestCheckpoint, LastCheckpoint, Checkpoint)
    places = (0, 1, 2, 3, 5, 6, 7)
    return next((place for place, kind in zip(places, kinds, strict=True) if isinstance(callback, kind)), 4)


def skip_idle_hooks(callbacks: Iterable[Callback]) -> None:
    """Let Lightning pass over a step's hooks that `callbacks` inherit and that do nothing.

    Lightning would call some 90 in every step, each within a context of its profiler. It skips a hook that is not
    callable.
    """
    for callback in callbacks:
        for hook in _IN_EVERY_STEP:
            if not is_overridden(hook, callback):
                setattr(callback, hook, None)


class NoProfiler(PassThroughProfiler):
    """A profiler that costs nothing: Lightning's own enters and leaves a generator around each call in a step."""

    def profile(self, action_name: str) -> nullcontext[str]:  # type: ignore[override]
        return nullcontext(action_name)
