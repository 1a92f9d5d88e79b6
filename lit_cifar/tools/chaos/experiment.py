"""Trains without faults, trains with faults, and compares the two."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_cifar.checkpoint.files import LAST
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.checkpoint.sample_audit import AuditRecord
from lit_cifar.errors import ConfigError
from lit_cifar.tools.chaos.audit import RESIZED_BOUND, audit, distance, effective, metric_problems
from lit_cifar.tools.chaos.faults import LEAST_BYTES, shares
from lit_cifar.tools.chaos.job import TorchrunJob, wait_until
from lit_cifar.tools.chaos.sample_log import SampleLogReader
from lit_cifar.tools.chaos.training import EVERY_N_STEPS, ResizedMode, Training, configured
from lit_cifar.tools.chaos.trial import Event, Report, Trial, TrialError

_BASELINE_LIMIT_S = 1800.0
_LAST = Path("run", "checkpoints", LAST)


@dataclass
class JobResult:
    """The result of a job."""

    mode: str
    sizes: tuple[int, ...]  # numbers of processes of the job, in order
    precision: str  # its `--trainer.precision`
    bound: float  # the largest difference allowed
    events: list[Event] = field(default_factory=list)
    restarts: int = 0  # how often its processes were started again
    repeated: int = 0  # optimizer steps that were run again after a restart
    missing: int | None = None  # samples that no step of an epoch has counted
    doubled: int | None = None  # samples that an epoch counts too often
    # The largest difference from the end of the baseline run; None if the job did not end.
    difference: float | None = None
    tensor: str | None = None  # the tensor with the largest difference
    seconds: float = 0.0  # duration, without that of the baseline run
    problems: list[str] = field(default_factory=list)  # what is wrong; empty for a PASS

    @property
    def passed(self) -> bool:
        return not self.problems


def chaos(
    modes: Sequence[ResizedMode], args: Sequence[str], *, num_faults: int, seed: int, folder: Path, report: Report
) -> list[JobResult]:
    """Inject so many faults into a training of each mode, with these flags of `fit`, one mode after the other.

    Most of the faults hit a job that keeps its size, the others one that is resized: there is a row for each. `seed` is
    that of kinds, moments and ranks. Everything is written to `folder`, which is empty; `report` is called with a line
    whenever something happens. A mode that cannot train even without faults is a `ConfigError`.
    """
    (flags, precision), equal_size, rows = configured(args, folder=folder), shares(num_faults)[0], []
    for mode in modes:
        for name, count in (("equal-size", equal_size), ("resized", num_faults - equal_size)):
            if count:
                training = Training(flags, precision, mode, count, resized=name == "resized")
                rows.append(_run(training, folder / mode.name / name, seed=seed, report=report))
    return rows


def _run(training: Training, folder: Path, *, seed: int, report: Report) -> JobResult:
    baseline = folder / "baseline"
    _train_baseline(training, baseline, report=report)
    can_fill = (baseline / _LAST).stat().st_size > LEAST_BYTES
    faults, size = training.faults(seed=seed, full_disk=can_fill), training.mode.num_processes
    sizes = tuple(dict.fromkeys([size, *(fault.size for fault in faults)]))
    bound = 0.0 if training.has_same_bits else RESIZED_BOUND
    row = JobResult(training.mode.name, sizes, training.precision, bound)
    reader, begin = SampleLogReader(folder / "sample_log"), time.monotonic()
    with _job(training, folder, max_restarts=len(faults) + 5) as job:
        trial = Trial(job, reader, folder / "run" / "checkpoints", EVERY_N_STEPS, report, row.events, row.problems)
        try:
            trial.run(faults, size=size)
            _compare(row, reader, folder, baseline)
        except TrialError as failure:
            row.problems.append(str(failure))
    row.seconds, row.restarts = time.monotonic() - begin, max(0, reader.num_starts - 1)
    return row


def _train_baseline(training: Training, folder: Path, *, report: Report) -> None:
    """Train at full size; a `ConfigError` if that fails without any fault."""
    name = training.mode.name
    with _job(training, folder, max_restarts=0, has_faults=False) as job:
        job.start(training.mode.num_processes)
        wait_until(lambda: job.status is not None, limit_s=_BASELINE_LIMIT_S, poll_s=0.1)
        if status := job.status:
            raise ConfigError(
                "\n".join([f"{name} cannot train even without faults: exit status {status}", *job.last_words()]),
                remedy=f"see that it works: python -m lit_cifar verify --modes {name}",
            )
        if status is None:
            raise ConfigError(
                f"{name} does not train {training.num_steps} steps within {_BASELINE_LIMIT_S:.0f} s without faults",
                remedy="pass fewer --faults, a smaller network or smaller batches",
            )
    report(f"{name}: {training.num_steps} steps without faults")


def _job(training: Training, folder: Path, *, max_restarts: int, has_faults: bool = True) -> TorchrunJob:
    (folder / "sample_log").mkdir(parents=True)

    def command(size: int) -> list[str]:
        return training.arguments(size, folder=folder, has_faults=has_faults)

    return TorchrunJob(command, folder=folder, max_restarts=max_restarts)


def _compare(row: JobResult, reader: SampleLogReader, folder: Path, baseline: Path) -> None:
    """Fill in how the samples and the end compare with the baseline run."""
    undisturbed = SampleLogReader(baseline / "sample_log")
    undisturbed.refresh()
    found = audit(reader.lines, baseline=effective(undisturbed.lines)[0])
    row.repeated, row.missing, row.doubled = found.repeated, found.missing, found.doubled
    row.problems += found.problems
    end, expected = read_checkpoint(folder / _LAST), read_checkpoint(baseline / _LAST)
    row.difference, row.tensor = distance(end, expected)
    if row.difference > row.bound:
        row.problems.append(f"{row.tensor} differs by {row.difference:.1e} at the end, allowed {row.bound:.0e}")
    if (record := AuditRecord.read(end)) is None or record != AuditRecord.read(expected):
        row.problems.append("the sample audit of the last checkpoint is not that of the uninterrupted run")
    if row.bound == 0.0:
        row.problems += metric_problems(folder / "run" / "metrics.csv", baseline / "run" / "metrics.csv")
