"""How long a run under torchrun stands still when a rank is killed, and who spends that time."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.tools.bench import timed_rank
from lit_cifar.tools.bench.measurements import Quantiles, Report, Row, Settings
from lit_cifar.tools.bench.overhead import write_random_cifar10
from lit_cifar.tools.chaos.job import TorchrunJob, is_alive, wait_until

EVENTS = ("started", "imported", "step")
_RANKS = 2
_MOST_KILLS = 4
_LIMIT_S = 120.0  # of a restart


class StepMarks(Callback):
    """Notes the end of each optimizer step in a file of `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        timed_rank.mark(self.folder, "step")


def measure(settings: Settings, report: Report) -> list[Row]:
    """Kill a rank of a training in `ddp` some times, and time what follows until both ranks have taken a step.

    Python, torch and Lightning are imported anew by each new process, as in any run under torchrun.

    Raises:
        RuntimeError: The training failed.
    """
    folder = settings.folder / "recovery"
    (folder / "marks").mkdir(parents=True)
    write_random_cifar10(folder / "data")
    program = [timed_rank.__file__, str(folder / "marks")]
    words = _words(settings, folder)
    job = TorchrunJob(lambda _: words, folder=folder, max_restarts=_MOST_KILLS, anew_every=1, program=program)
    with job:
        report("recovery: the start of a training under torchrun")
        job.start(_RANKS)
        _wait_for_steps(job)
        found = []
        for number in range(min(settings.rounds, _MOST_KILLS)):
            report(f"recovery after kill -9 of rank {(number + 1) % _RANKS}")
            found.append(_kill(job, (number + 1) % _RANKS))

    def quantiles(part: Callable[[Recovery], float]) -> Quantiles:
        return Quantiles(tuple(map(part, found)))

    row = partial(Row, section="recovery", unit="s")
    total = "from kill -9 of a rank to the next optimizer step, ddp on 2 processes under torchrun"
    return [
        row(name=total, found=quantiles(lambda each: each.total_s)),
        row(
            name="of it ours: ending the other rank, start of fit to the step",
            found=quantiles(lambda each: each.ours_s),
            note="includes torchrun's notice of the death, which looks ten times a second",
        ),
        row(
            name="of that until the other rank has ended",
            found=quantiles(lambda each: each.ended - each.killed),
            note="which first writes the checkpoint that it has begun",
        ),
        row(
            name="the same from the start of fit to the step, in processor time of a rank",
            found=quantiles(lambda each: each.ours_cpu_s),
            note="which other programs on the machine change less",
        ),
        row(name="of it torchrun's: starting new processes", found=quantiles(lambda each: each.torchrun_s)),
        row(name="of it imports of torch and Lightning", found=quantiles(lambda each: each.imports_s)),
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


def _words(settings: Settings, folder: Path) -> list[str]:
    """A training that runs until it is killed."""
    words = ["fit", "--trainer.strategy=ddp", "--trainer.accelerator=cpu", "--resume=auto"]
    words += [f"--run_dir={folder / 'run'}", f"--data.root={folder / 'data'}", "--data.batch_size=32"]
    words += [f"--model.arch={settings.arch}", "--model.stem=imagenet", "--last_checkpoint.every_n_steps=10"]
    return [*words, f"--trainer.callbacks+={__name__}.StepMarks", f"--trainer.callbacks.folder={folder / 'marks'}"]


def _wait_for_steps(job: TorchrunJob, *, former: frozenset[int] = frozenset(), steps: int = 3) -> Mapping[int, "_Rank"]:
    """The ranks, by rank, once each has taken so many steps; `former` are the pids of an earlier start."""
    ranks: dict[int, _Rank] = {}

    def have_taken() -> bool:
        ranks.update({rank.number: rank for rank in _read(job.folder / "marks") if rank.pid not in former})
        return len(ranks) == _RANKS and all(len(rank.at["step"]) >= steps for rank in ranks.values())

    wait_until(lambda: have_taken() or job.status is not None, limit_s=_LIMIT_S, poll_s=0.005)
    if not have_taken():
        words = "\n".join(job.log_since(0)[-8:])
        raise RuntimeError(f"the training under torchrun failed:\n{words}")
    return ranks


def _kill(job: TorchrunJob, number: int) -> Recovery:
    """Kill a rank in the middle of a step, and wait for the next steps of new processes."""
    former = frozenset(rank.pid for rank in _read(job.folder / "marks"))
    now = job.ranks()
    now[number].kill()
    killed = time.monotonic()
    wait_until(lambda: not any(map(is_alive, now.values())), limit_s=_LIMIT_S)
    ended = time.monotonic()
    ranks = _wait_for_steps(job, former=former).values()
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
