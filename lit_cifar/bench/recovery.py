"""How long a run under torchrun stands still when a rank is killed, and who spends that time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.bench import timed_rank
from lit_cifar.bench.overhead import with_package
from lit_cifar.bench.random_cifar10 import write_random_cifar10
from lit_cifar.bench.rows import Row
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.timed_rank import MARKS, mark
from lit_cifar.bench.timing import Spread

EVENTS = ("started", "imported", "step")
_RANKS = 2
_MOST_KILLS = 4
_LIMIT_S = 120.0  # of a restart
_POLL_S = 0.005


class StepMarks(Callback):
    """Notes the end of each optimizer step."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        mark("step")


def measure(settings: Settings, report: Report) -> list[Row]:
    """Kill a rank of a training in `ddp` some times, and time what follows until both ranks have taken a step.

    Python, torch and Lightning are imported anew by each new process, as in any run under torchrun.

    Raises:
        RuntimeError: The training failed.
    """
    with _training(settings) as job:
        report("recovery: the start of a training under torchrun")
        job.wait_for_steps()
        found = []
        for number in range(min(settings.rounds, _MOST_KILLS)):
            report(f"recovery after kill -9 of rank {(number + 1) % _RANKS}")
            found.append(job.kill((number + 1) % _RANKS))
    spread = partial(_spread, found)
    row = partial(Row, section="recovery", unit="s")
    total = "from kill -9 of a rank to the next optimizer step, ddp on 2 processes under torchrun"
    return [
        row(name=total, found=spread(lambda each: each.total_s)),
        row(
            name="of it ours: ending the other rank, start of fit to the step",
            found=spread(lambda each: each.ours_s),
            note="includes torchrun's notice of the death, which looks ten times a second",
        ),
        row(
            name="of that until the other rank has ended",
            found=spread(lambda each: each.ended - each.killed),
            note="which first writes the checkpoint that it has begun",
        ),
        row(
            name="the same from the start of fit to the step, in processor time of a rank",
            found=spread(lambda each: each.ours_cpu_s),
            note="which other programs on the machine change less",
        ),
        row(name="of it torchrun's: starting new processes", found=spread(lambda each: each.torchrun_s)),
        row(name="of it imports of torch and Lightning", found=spread(lambda each: each.imports_s)),
    ]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Moments of a recovery, in seconds; of several processes, the last one's."""

    killed: float
    ended: float  # no process of the former start is left
    started: float  # Python runs in the new processes
    imported: float  # torch and Lightning
    stepped: float  # the first optimizer step is done
    ours_cpu_s: float  # processor time between the last two, of the process that used most

    @property
    def total_s(self) -> float:
        return self.stepped - self.killed

    @property
    def ours_s(self) -> float:
        return self.ended - self.killed + self.stepped - self.imported

    @property
    def torchrun_s(self) -> float:
        return self.started - self.ended

    @property
    def imports_s(self) -> float:
        return self.imported - self.started


def _spread(found: list[Recovery], part: Callable[[Recovery], float]) -> Spread:
    return Spread(tuple(map(part, found)))


@contextmanager
def _training(settings: Settings) -> Iterator["_Job"]:
    """A training that runs until it is killed."""
    folder = settings.folder / "recovery"
    marks = folder / "marks"
    marks.mkdir(parents=True)
    write_random_cifar10(folder / "data")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}"]
    command += [f"--max-restarts={_MOST_KILLS}", timed_rank.__file__]
    command += ["fit", "--trainer.strategy=ddp", "--trainer.accelerator=cpu", "--resume=auto"]
    command += [f"--run_dir={folder / 'run'}", f"--data.root={folder / 'data'}", "--data.batch_size=32"]
    command += [f"--model.arch={'tiny' if settings.small else 'resnet34'}", "--model.stem=imagenet"]
    command += ["--last_checkpoint.every_n_steps=10", f"--trainer.callbacks+={__name__}.StepMarks"]
    environment = {**with_package(os.environ), "OMP_NUM_THREADS": "1", MARKS: str(marks)}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield _Job(process, marks, folder / "log.txt")
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks."""
    with suppress(psutil.Error):
        family = psutil.Process(process.pid)
        for member in [family, *family.children(recursive=True)]:
            with suppress(psutil.Error):
                member.kill()
    process.wait()


@dataclass(frozen=True)
class _Job:
    torchrun: subprocess.Popen[bytes]
    marks: Path
    log: Path

    def wait_for_steps(self, *, former: frozenset[int] = frozenset(), steps: int = 3) -> Mapping[int, "_Rank"]:
        """The ranks, by rank, once each has taken so many steps; `former` are the pids of an earlier start."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            ranks = {rank.number: rank for rank in _read(self.marks) if rank.pid not in former}
            if len(ranks) == _RANKS and all(len(rank.at["step"]) >= steps for rank in ranks.values()):
                return ranks
            if self.torchrun.poll() is not None or time.monotonic() > deadline:
                words = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
                raise RuntimeError(f"the training under torchrun failed:\n{words}")
            time.sleep(_POLL_S)

    def kill(self, number: int) -> Recovery:
        """Kill a rank in the middle of a step, and wait for the next steps of new processes."""
        former = frozenset(rank.pid for rank in _read(self.marks))
        now = {rank.number: rank for rank in _read(self.marks) if psutil.pid_exists(rank.pid)}
        os.kill(now[number].pid, signal.SIGKILL)
        killed = time.monotonic()
        while any(_runs(rank.pid) for rank in now.values()):
            time.sleep(_POLL_S)
        ended = time.monotonic()
        ranks = self.wait_for_steps(former=former).values()
        last = {event: max(rank.at[event][0] for rank in ranks) for event in EVENTS}
        return Recovery(
            killed=killed,
            ended=ended,
            started=last["started"],
            imported=last["imported"],
            stepped=last["step"],
            ours_cpu_s=max(rank.cpu["step"][0] - rank.cpu["imported"][0] for rank in ranks),
        )


@dataclass(frozen=True)
class _Rank:
    number: int
    pid: int
    at: Mapping[str, list[float]]  # moments of its events, in seconds
    cpu: Mapping[str, list[float]]  # processor time until then


def _read(marks: Path) -> list[_Rank]:
    """All processes so far; a line that is being written is left out."""
    ranks = []
    for path in marks.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
        at, cpu = (
            {event: [line[key] for line in lines if line["event"] == event] for event in EVENTS}
            for key in ("at_s", "cpu_s")
        )
        if lines:
            ranks.append(_Rank(lines[0]["rank"], int(path.stem), at, cpu))
    return ranks


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
