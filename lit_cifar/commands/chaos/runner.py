"""Trains undisturbed, trains under faults, and compares the two."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lit_cifar.commands.chaos.disk import SmallDisk, small_disk
from lit_cifar.commands.chaos.endings import (
    RESIZED_BOUND,
    distance,
    metric_problems,
    position_problems,
    receipt_problems,
)
from lit_cifar.commands.chaos.history import Batches, audit, effective
from lit_cifar.commands.chaos.job import Job, wait_until
from lit_cifar.commands.chaos.journal import JournalReader
from lit_cifar.commands.chaos.plan import Fault, equal_size_cards, plan, resized_cards, shares
from lit_cifar.commands.chaos.rows import Row
from lit_cifar.commands.chaos.settings import EVERY_N_STEPS, NUM_SAMPLES, Mode, Training
from lit_cifar.commands.chaos.trial import Report, Trial, TrialError
from lit_cifar.errors import ConfigError

_UNDISTURBED_LIMIT_S = 600.0
_LAST = Path("checkpoints") / "last.ckpt"
_SPARE_BYTES = 32 << 20  # for logs and figures on the small disk
_NUM_FILES = 6  # last, previous, best, the next of one of them, and some air


@dataclass(frozen=True)
class Undisturbed:
    """The training without faults.

    Attributes:
        run: Its run folder.
        batches: The ids of the global batch of every step.
    """

    run: Path
    batches: Batches

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Size of its last checkpoint."""
        return (self.run / _LAST).stat().st_size


def undisturbed(training: Training, folder: Path, *, report: Report) -> Undisturbed:
    """Train at full size.

    Raises:
        ConfigError: It fails without any fault.
    """
    begin, size = time.monotonic(), training.mode.num_processes
    with _job(training, folder / "run", folder, max_restarts=0, saves=False) as job:
        job.start(size)
        ended = wait_until(lambda: job.status is not None, limit_s=_UNDISTURBED_LIMIT_S, poll_s=0.1)
        if job.status != 0:
            what = f"exit status {job.status}" if ended else f"no end within {_UNDISTURBED_LIMIT_S:.0f} s"
            words = [line[:160] for line in job.log_since(0) if "lit_cifar: " in line or "Error: " in line][-2:]
            raise ConfigError(
                "\n".join([f"{training.mode.name} cannot train even without faults: {what}", *words]),
                remedy=f"see that it works: python -m lit_cifar verify --modes {training.mode.name}",
            )
    reader = JournalReader(folder / "journal")
    reader.refresh()
    batches, _ = effective(reader.lines)
    report(f"{time.monotonic() - begin:6.1f} s  {training.mode.name}: {training.num_steps} steps without faults")
    return Undisturbed(folder / "run", batches)


def run_trial(
    training: Training,
    faults: Sequence[Fault],
    reference: Undisturbed,
    folder: Path,
    *,
    disk: SmallDisk,
    report: Report,
) -> Row:
    """Train under faults at full size, or through all sizes of the plan, and compare the end."""
    size = training.mode.num_processes
    sizes = tuple(dict.fromkeys([size, *(fault.size for fault in faults)]))
    row = Row(training.mode.name, sizes, training.precision, bound=RESIZED_BOUND if training.resized else 0.0)
    run, reader, begin = disk.folder / "run", JournalReader(folder / "journal"), time.monotonic()
    with _job(training, run, folder, max_restarts=len(faults) + 5) as job:
        trial = Trial(job, reader, disk, run / "checkpoints", EVERY_N_STEPS, report)
        row.events, row.problems = trial.events, trial.problems
        try:
            trial.run(faults, size=size)
            _compare(row, reader, run, reference)
        except TrialError as failure:
            row.problems.append(str(failure))
        row.seconds = time.monotonic() - begin
        row.restarts = reader.num_starts - 1
        row.own_restarts = max(0, row.restarts - trial.num_planned_restarts)
    return row


def _job(training: Training, run: Path, folder: Path, *, max_restarts: int, saves: bool = True) -> Job:
    (folder / "journal").mkdir(parents=True)

    def command(size: int) -> list[str]:
        return training.arguments(size, run=run, journal=folder / "journal", saves=saves)

    return Job(command, folder=folder, max_restarts=max_restarts)


def _compare(row: Row, reader: JournalReader, run: Path, reference: Undisturbed) -> None:
    """Fill in how the samples and the end compare with the undisturbed run."""
    found = audit(reader.lines, undisturbed=reference.batches, num_samples=NUM_SAMPLES)
    row.repeated, row.missing, row.doubled = found.repeated, found.missing, found.doubled
    row.problems += found.problems
    row.difference, row.tensor = distance(run / _LAST, reference.run / _LAST)
    if row.difference > row.bound:
        row.problems.append(f"{row.tensor} is off by {row.difference:.1e} at the end, allowed {row.bound:.0e}")
    row.problems += position_problems(run / _LAST, reference.run / _LAST)
    row.problems += receipt_problems(run / "receipt.csv", reference.run / "receipt.csv")
    if row.bound == 0.0:
        row.problems += metric_problems(run / "metrics.csv", reference.run / "metrics.csv")


def chaos(
    modes: Sequence[Mode], *, num_faults: int, seed: int, folder: Path, report: Report = lambda line: None
) -> tuple[list[Row], list[str]]:
    """Hit a training of each mode with so many faults.

    Args:
        modes: One after the other.
        num_faults: For each mode: most of them hit a job that keeps its size, the others one that is resized.
        seed: Of kinds, moments and ranks.
        folder: Exists, empty; everything is written there.
        report: Called with a line whenever something happens.

    Returns:
        For each mode a row of the job that keeps its size, and one of the job that is resized, if there are faults for
        it; and how disks were filled.

    Raises:
        ConfigError: A mode cannot train even without faults.
    """
    rows, ways = [], set()
    for mode in modes:
        for resized, count in zip((False, True), shares(num_faults), strict=True):
            if not count:
                continue
            own = folder / mode.name / ("resized" if resized else "equal-size")
            training = Training.under(mode, count, resized=resized)
            reference = undisturbed(training, own / "undisturbed", report=report)
            with _disk(own / "disk", reference) as disk:
                ways.add(disk.how or "left out, as this system offers no way to fill one")
                faults = plan_for(training, count, seed=seed, full_disk=disk.how is not None)
                rows.append(run_trial(training, faults, reference, own, disk=disk, report=report))
                _keep(disk.folder / "run", own / "run")
    return rows, sorted(ways)


def _keep(run: Path, target: Path) -> None:
    """Take a run folder from a disk that will be gone."""
    if run.exists():
        shutil.copytree(run, target)


def plan_for(training: Training, num_faults: int, *, seed: int, full_disk: bool = True) -> list[Fault]:
    """What happens to a job: from its second checkpoint on, and until shortly before its end."""
    full = training.mode.num_processes
    cards = equal_size_cards(num_faults, seed=seed, full_disk=full_disk)
    return plan(
        resized_cards(num_faults) if training.resized else cards,
        seed=seed,
        sizes=(full, 1) if training.resized else (full,),
        first_step=2 * EVERY_N_STEPS + 2,
        last_step=training.num_steps - 2 * EVERY_N_STEPS,
    )


@contextmanager
def _disk(folder: Path, reference: Undisturbed) -> Iterator[SmallDisk]:
    folder.mkdir(parents=True)
    with small_disk(folder, num_bytes=_NUM_FILES * reference.checkpoint_bytes + _SPARE_BYTES) as disk:
        yield disk
