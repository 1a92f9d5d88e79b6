"""Trains without faults, trains with faults, and compares the two."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lit_cifar.chaos.audit import RESIZED_BOUND, distance, metric_problems, position_problems, receipt_problems
from lit_cifar.chaos.disk_fault import CAN_FILL, LEAST_BYTES
from lit_cifar.chaos.fault_schedule import Fault, equal_size_cards, resized_cards, schedule_faults, shares
from lit_cifar.chaos.injector import Report, Trial, TrialError
from lit_cifar.chaos.job import TorchrunJob, wait_until
from lit_cifar.chaos.result_table import JobResult
from lit_cifar.chaos.sample_history import Batches, audit, effective
from lit_cifar.chaos.sample_log import JournalReader
from lit_cifar.chaos.training import ANEW_EVERY, EVERY_N_STEPS, Configuration, JobMode, Training
from lit_cifar.errors import ConfigError

_UNDISTURBED_LIMIT_S = 600.0
_LAST = Path("checkpoints") / "last.ckpt"


@dataclass(frozen=True)
class Undisturbed:
    """The training without faults."""

    run: Path  # its run folder
    batches: Batches  # the ids of the global batch of every step
    start_s: float  # seconds until its processes, which were forked, had done their first step


class _Alone:
    """A training without faults, while it runs."""

    def __init__(self, training: Training, job: TorchrunJob) -> None:
        self.training, self.job = training, job
        self._reader = JournalReader(job.folder / "journal")
        self._begin, self._seconds, self._start_s = time.monotonic(), 0.0, 0.0
        job.start(training.mode.num_processes)

    def has_ended(self) -> bool:
        """Whether it has; to be asked often."""
        self._reader.refresh()
        if self._reader.newest is not None and not self._start_s:
            self._start_s = time.monotonic() - self.job.newest[0].at_s
        if self.job.status is None:
            return False
        self._seconds = self._seconds or time.monotonic() - self._begin
        return True

    def result(self, report: Report) -> Undisturbed:
        """What it has left; a `ConfigError` if it has failed, or still runs."""
        name, status = self.training.mode.name, self.job.status
        if status != 0:
            what = f"no end within {_UNDISTURBED_LIMIT_S:.0f} s" if status is None else f"exit status {status}"
            words = [line[:160] for line in self.job.last_words()]
            raise ConfigError(
                "\n".join([f"{name} cannot train even without faults: {what}", *words]),
                remedy=f"see that it works: python -m lit_cifar verify --modes {name}",
            )
        self._reader.refresh()
        batches, _ = effective(self._reader.lines)
        report(f"{self._seconds:6.1f} s  {name}: {self.training.num_steps} steps without faults")
        return Undisturbed(self.job.folder / "run", batches, self._start_s)


def undisturbed(trainings: Sequence[Training], folders: Sequence[Path], *, report: Report) -> list[Undisturbed]:
    """Train at full size, all side by side; a `ConfigError` if one fails without any fault."""
    with ExitStack() as stack:
        alone = [
            _Alone(training, stack.enter_context(_job(training, folder, disturbed=False)))
            for training, folder in zip(trainings, folders, strict=True)
        ]

        def is_over() -> bool:
            ended = [one.has_ended() for one in alone]  # each is asked
            return all(ended) or any(one.job.status for one in alone)

        wait_until(is_over, limit_s=_UNDISTURBED_LIMIT_S, poll_s=0.1)
        return [one.result(report) for one in sorted(alone, key=lambda one: not one.job.status)]  # the failed first


def run_trial(
    training: Training, faults: Sequence[Fault], reference: Undisturbed, folder: Path, *, report: Report
) -> JobResult:
    """Train under faults at full size, or through all sizes, and compare the end."""
    size = training.mode.num_processes
    sizes = tuple(dict.fromkeys([size, *(fault.size for fault in faults)]))
    row = JobResult(
        training.mode.name, sizes, training.precision, bound=0.0 if training.has_same_bits else RESIZED_BOUND
    )
    run, reader, begin = folder / "run", JournalReader(folder / "journal"), time.monotonic()
    with _job(training, folder, max_restarts=len(faults) + 5, anew_every=ANEW_EVERY) as job:
        trial = Trial(job, reader, run / "checkpoints", EVERY_N_STEPS, reference.start_s, report)
        row.events, row.problems = trial.events, trial.problems
        try:
            trial.run(faults, size=size)
            _compare(row, reader, run, reference)
        except TrialError as failure:
            row.problems.append(str(failure))
        row.seconds = time.monotonic() - begin
        row.restarts = reader.num_starts - 1
        row.own_restarts = max(0, row.restarts - trial.num_planned_restarts)
        row.anew = len({worker.start for worker in job.workers if worker.anew and worker.start != (1, 0)})
    return row


def _job(
    training: Training, folder: Path, *, anew_every: int = 0, max_restarts: int = 0, disturbed: bool = True
) -> TorchrunJob:
    (folder / "journal").mkdir(parents=True)

    def command(size: int) -> list[str]:
        return training.arguments(size, run=folder / "run", journal=folder / "journal", disturbed=disturbed)

    return TorchrunJob(command, folder=folder, max_restarts=max_restarts, anew_every=anew_every)


def _compare(row: JobResult, reader: JournalReader, run: Path, reference: Undisturbed) -> None:
    """Fill in how the samples and the end compare with the uninterrupted run."""
    found = audit(reader.lines, undisturbed=reference.batches)
    row.repeated, row.missing, row.doubled = found.repeated, found.missing, found.doubled
    row.problems += found.problems
    row.difference, row.tensor = distance(run / _LAST, reference.run / _LAST)
    if row.difference > row.bound:
        row.problems.append(f"{row.tensor} differs by {row.difference:.1e} at the end, allowed {row.bound:.0e}")
    row.problems += position_problems(run / _LAST, reference.run / _LAST)
    row.problems += receipt_problems(run / "receipt.csv", reference.run / "receipt.csv")
    if row.bound == 0.0:
        row.problems += metric_problems(run / "metrics.csv", reference.run / "metrics.csv")


def chaos(
    modes: Sequence[JobMode],
    args: Sequence[str] = (),
    *,
    num_faults: int,
    seed: int,
    folder: Path,
    report: Report = lambda line: None,
) -> list[JobResult]:
    """Inject so many faults into a training of each mode, with these flags of `fit`, one mode after the other.

    Most of the faults hit a job that keeps its size, the others one that is resized: there is a row for each. `seed` is
    that of kinds, moments and ranks. Everything is written to `folder`, which is empty; `report` is called with a line
    whenever something happens. A mode that cannot train even without faults is a `ConfigError`.
    """
    rows = []
    configuration = Configuration.of(args, folder=folder)
    for mode in modes:
        counts = [count for count in shares(num_faults) if count]
        trainings = [
            Training.under(configuration, mode, count, resized=number == 1) for number, count in enumerate(counts)
        ]
        folders = [folder / mode.name / ("resized" if training.resized else "equal-size") for training in trainings]
        references = undisturbed(trainings, [own / "undisturbed" for own in folders], report=report)
        for count, training, own, reference in zip(counts, trainings, folders, references, strict=True):
            can_fill = CAN_FILL and (reference.run / _LAST).stat().st_size > LEAST_BYTES
            faults = plan_for(training, count, seed=seed, full_disk=can_fill)
            rows.append(run_trial(training, faults, reference, own, report=report))
    return rows


def plan_for(training: Training, num_faults: int, *, seed: int, full_disk: bool = True) -> list[Fault]:
    """What happens to a job: from its second checkpoint on, and until shortly before its end."""
    full = training.mode.num_processes
    cards = equal_size_cards(num_faults, seed=seed, full_disk=full_disk)
    return schedule_faults(
        resized_cards(num_faults) if training.resized else cards,
        seed=seed,
        sizes=training.mode.sizes if training.resized else (full,),
        first_step=2 * EVERY_N_STEPS + 2,
        last_step=training.num_steps - 2 * EVERY_N_STEPS,
    )
