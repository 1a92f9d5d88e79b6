"""How long a run under torchrun stands still when a rank is killed, and who spends that time."""

import os
from collections.abc import Collection
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np
import psutil
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.tools.bench import Row, Settings
from lit_cifar.tools.chaos.job import TorchrunJob, is_alive, wait_until

_RANKS = 2
_MOST_KILLS = 4
_LIMIT_S = 120.0  # of a restart


class Marks(Callback):
    """Writes the time of its own `setup`, then that of the end of each step, into a file named by the process."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._mark()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._mark()

    def _mark(self) -> None:
        with (self.folder / str(os.getpid())).open("a") as file:
            file.write(f"{monotonic()}\n")


def measure(settings: Settings) -> list[Row]:
    """Kill a rank of a training in `ddp` some times, and time what follows until both ranks have taken a step.

    Python, torch and Lightning are imported anew by each new process, as in any run under torchrun.

    Raises:
        RuntimeError: The training failed.
    """
    folder = settings.folder / "recovery"
    marks = folder / "marks"
    marks.mkdir(parents=True)
    words = ["fit", "--trainer.strategy=ddp", "--trainer.accelerator=cpu", "--resume=auto", "--data.dataset=synthetic"]
    words += ["--data.batch_size=32", f"--model.arch={settings.arch}", "--model.stem=imagenet"]
    words += ["--last_checkpoint.every_n_steps=2", f"--run_dir={folder / 'run'}"]
    words += [f"--trainer.callbacks+={__name__}.Marks", f"--trainer.callbacks.folder={marks}"]
    with TorchrunJob(lambda _: words, folder=folder, max_restarts=_MOST_KILLS) as job:
        job.start(_RANKS)
        _wait_for_steps(job, marks)
        kills = range(min(settings.rounds, _MOST_KILLS))
        moments = np.array([_kill(job, marks, rank=(kill + 1) % _RANKS) for kill in kills])
    total = "from kill -9 of a rank to the next optimizer step, ddp on 2 processes under torchrun"
    parts = (
        "of it until the other rank has ended",
        "of it until torchrun has started new processes",
        "of it Python, the imports of torch and Lightning, and reading the flags",
        "of it from there to the step",
    )
    seconds = [moments[:, -1] - moments[:, 0], *np.diff(moments).T]
    return [Row(name, "s", own) for name, own in zip((total, *parts), seconds, strict=True)]


def _kill(job: TorchrunJob, marks: Path, *, rank: int) -> list[float]:
    """Kill a rank in the middle of a step.

    Returns:
        When it was killed, all old processes had ended, new ones were started, had read their flags, took a step.
    """
    former = job.ranks()
    former[rank].kill()
    killed = monotonic()
    wait_until(lambda: not any(map(is_alive, former.values())), limit_s=_LIMIT_S)
    ended = monotonic()
    new = _wait_for_steps(job, marks, former=[process.pid for process in former.values()])
    ready, stepped, *_ = map(max, zip(*(_read(marks, process.pid) for process in new), strict=False))
    started = max(process.create_time() for process in new) - time() + monotonic()
    # torchrun may have been faster than `wait_until` looked.
    return [killed, ended, max(ended, started), ready, stepped]


def _wait_for_steps(
    job: TorchrunJob, marks: Path, *, former: Collection[int] = (), steps: int = 3
) -> list[psutil.Process]:
    """The newest processes, once each has taken so many steps; `former` are the pids of an earlier start."""

    def new() -> list[psutil.Process]:
        return [its for its in job.ranks().values() if its.pid not in former and len(_read(marks, its.pid)) > steps]

    wait_until(lambda: len(new()) == _RANKS or job.status is not None, limit_s=_LIMIT_S)
    if len(found := new()) < _RANKS:
        words = "\n".join(job.log_since(0)[-8:])
        raise RuntimeError(f"the training under torchrun failed:\n{words}")
    return found


def _read(marks: Path, pid: int) -> list[float]:
    """What a process has written so far; a line that is being written is left out."""
    file = marks / str(pid)
    return [float(line) for line in file.read_text().rpartition("\n")[0].splitlines()] if file.exists() else []
