"""The callbacks of a run, and the order in which they are called."""

from collections.abc import Iterable
from contextlib import nullcontext

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_cifar.checkpoint.callbacks import StepBoundary
from lit_cifar.checkpoint.exact_resume import ExactResume
from lit_cifar.checkpoint.sample_audit import SampleAudit
from lit_cifar.launch.malloc_tuning import KeepFreedMemory
from lit_cifar.models.random_streams import RandomStreams
from lit_cifar.reporting.evaluation_tables import EvaluationTables
from lit_cifar.reporting.progress import Throughput
from lit_cifar.reporting.run_report import RunReport
from lit_cifar.task.metrics import EpochMeans

_IN_EVERY_STEP = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
_IN_EVERY_STEP += ["on_before_optimizer_step", "on_train_batch_end"]


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
        EvaluationTables(),
        RunReport(),
    ]


# The callbacks that the command line makes, by the names of their classes, in the order in which they are called.
# Those that the module and the data module add come before the ones that save.
ORDER = (
    "SameStart",  # ends a run whose processes would differ in what follows
    "StepBoundary",  # acts when the next batch has been fetched, and before anybody uses it
    "Watchdog",  # watches the next callbacks too, which may hang
    "EpochMeans",  # computes the means that others read
    "VirtualReplicas",  # gives parameters their gradients, which the next may change
    "",  # the user's callbacks, unless they are of a kind below
    "ProgressBar",
    "EpochLines",
    "EvaluationFigures",
    "ReplicaAudit",
    "KeepFreedMemory",
    "RandomStreams",
    "ExactResume",
    "SampleAudit",
    "LearningRateMonitor",
    "Throughput",
    "EvaluationTables",
    "PredictionWriter",
    "RunReport",
    "SavedConfig",
    "BestCheckpoint",  # callbacks that save come last, because their state must be the last to change
    "LastCheckpoint",
    "Checkpoint",  # the user's, after ours, because the summary of the run names the first one's files
)


def place(callback: Callback) -> int:
    """Sort key of callbacks: where their class, or the nearest base class that is listed, stands in `ORDER`."""
    named = (ORDER.index(kind.__name__) for kind in type(callback).__mro__ if kind.__name__ in ORDER)
    return next(named, ORDER.index(""))


def skip_idle_hooks(callbacks: Iterable[Callback]) -> None:
    """Let Lightning pass over a step's hooks that `callbacks` inherit and that do nothing.

    Lightning would call some 90 a step, each within a context of its profiler. It skips a hook that is not callable.
    """
    for callback in callbacks:
        for hook in _IN_EVERY_STEP:
            if not is_overridden(hook, callback):
                setattr(callback, hook, None)


_UNTIMED = nullcontext("")  # one for all calls, of which a step has some forty


class NoProfiler(PassThroughProfiler):
    """A profiler that costs nothing: Lightning's own enters and leaves a generator around each call in a step."""

    def profile(self, action_name: str) -> nullcontext[str]:  # type: ignore[override]
        return _UNTIMED
