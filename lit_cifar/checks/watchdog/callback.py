"""Ends a run of several processes when one of them has died or hangs, and reports which."""

import math
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_cifar import internals
from lit_cifar.errors import ConfigError, Stopped, bounded
from lit_cifar.launch.signals import launched_by_lightning
from lit_cifar.launch.startup import exit_with_parent

if TYPE_CHECKING:
    from lit_cifar.checks.watchdog.monitor import Monitor

_LEAST_TIMEOUT_S = 5.0  # the time of several heartbeats, of which one may be late


class Watchdog(Callback):
    """Watches the processes of a run with several, from a thread in each.

    It reports a process that has died, is stopped or unreachable, or has raised an exception, with its pid, step, and
    signal or traceback, and where ranks stand that do not get on. Then all processes exit with status 1.

    Args:
        timeout_s: Seconds without a heartbeat after which a process counts as dead, unless it is seen to run. The least
            value is 5; with 0 there is no watchdog, as a debugger needs.
        hang_timeout_s: Seconds after which the run is ended in which no rank has got on: none has begun or ended a
            batch, or come to another line of Python: more than the longest call takes, such as to compile. By default
            only torch gives up, when a collective operation has waited for the strategy's `timeout`, half an hour.
    """

    def __init__(self, timeout_s: float = 20.0, hang_timeout_s: float | None = None) -> None:
        bounded("--watchdog.timeout_s", timeout_s or _LEAST_TIMEOUT_S, _LEAST_TIMEOUT_S)
        bounded("--watchdog.hang_timeout_s", hang_timeout_s, _LEAST_TIMEOUT_S)
        if hang_timeout_s is not None and not timeout_s:
            problem = f"--watchdog.hang_timeout_s={hang_timeout_s:g} has no effect with --watchdog.timeout_s=0"
            raise ConfigError(problem, remedy="leave one of the two out")
        self.timeout_s = timeout_s
        self.hang_timeout_s = math.inf if hang_timeout_s is None else hang_timeout_s
        self._watch: Monitor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the watch. The processes have met, and each waits here for all others."""
        if not self.timeout_s or trainer.world_size == 1 or not dist.is_initialized():
            return
        if (error := next(internals.missing(internals.WATCHDOG), None)) is not None:
            rank_zero_warn(f"the processes are not watched: {error.problem}")
            return
        is_spawned = multiprocessing.parent_process() is not None
        # The process that started this one belongs to the run; a shell may exit before the run.
        if is_spawned or dist.is_torchelastic_launched() or launched_by_lightning(trainer):
            exit_with_parent()
        if is_spawned:
            # Lightning handles exceptions of a spawned process in the parent, and does not call `on_exception`.
            trainer._run_stage = partial(self._run_stage, trainer, pl_module)  # type: ignore[method-assign]
        name_who_ends(trainer)
        from lit_cifar.checks.watchdog.diagnosis import Patience
        from lit_cifar.checks.watchdog.monitor import Monitor  # one process needs none
        from lit_cifar.checks.watchdog.progress import Progress
        from lit_cifar.checks.watchdog.store import meet

        board, everyone = meet(trainer.global_rank, trainer.world_size)
        patience = Patience(self.timeout_s, self.hang_timeout_s)
        progress = Progress(partial(_count, trainer))
        self._watch = Monitor(everyone, rank=trainer.global_rank, board=board, patience=patience, progress=progress)
        self._watch.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the others. If another rank failed first, do not show this exception, which is a consequence."""
        if self._watch is None:
            return
        if isinstance(exception, Stopped | SIGTERMException | KeyboardInterrupt):  # the user has stopped the run
            self._leave()
            return
        if threading.current_thread() is threading.main_thread():
            # A launcher that has seen another process die sends SIGTERM, which would interrupt what follows.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lines = "".join(traceback.format_exception(exception)).splitlines()[-12:]
        verdict = self._watch.fail("" if isinstance(exception, ConfigError) else "\n".join(lines))  # it shows itself
        if verdict is not None and verdict.rank != trainer.global_rank:
            sys.excepthook = lambda *_: None

    def _run_stage(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        del trainer._run_stage  # the method of the class takes over again
        try:
            return trainer._run_stage()
        except BaseException as exception:
            self.on_exception(trainer, pl_module, exception)
            raise

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.leave()
        self._watch = None


def name_who_ends(trainer: Trainer) -> None:
    """Let Lightning's observer of the processes that it has started say which has ended, where no watchdog does."""
    if trainer.world_size > 1 and next(internals.missing(internals.WATCHDOG), None) is None:
        internals.ChildProcessObserver._terminate_all = _end_all


def _end_all(observer: Any) -> None:
    from lit_cifar.checks.watchdog.heartbeat import ending

    for thread in threading.enumerate():
        if thread.name == "watchdog":
            thread.join()  # it reports more, and ends all
    for rank, process in enumerate(observer._child_processes, start=1):
        if process.returncode:
            print(f"lit_cifar: rank {rank} has ended: {ending(process.returncode)}; all stop", file=sys.stderr)
        process.kill()
    os._exit(1)


def _count(trainer: Trainer) -> tuple[int, ...]:
    """The number of optimizer steps that are done, and the numbers of batches that have begun, and have ended."""
    fit = trainer.fit_loop.epoch_loop
    loops = (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    counts = [loop.batch_progress.total for loop in loops]
    return trainer.global_step, *(count.ready for count in counts), *(count.completed for count in counts)
