"""Trains without faults, trains with faults, and compares the two."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from lit_cifar.errors import ConfigError
from lit_cifar.tools.chaos.audit import (
    RESIZED_BOUND,
    Batches,
    audit,
    distance,
    effective,
    metric_problems,
    position_problems,
    receipt_problems,
)
from lit_cifar.tools.chaos.faults import (
    CAN_FILL,
    LEAST_BYTES,
    Fault,
    equal_size_faults,
    resized_faults,
    schedule_faults,
    shares,
)
from lit_cifar.tools.chaos.injector import Event, Report, Trial, TrialError
from lit_cifar.tools.chaos.job import TorchrunJob, wait_until
from lit_cifar.tools.chaos.sample_log import SampleLogReader
from lit_cifar.tools.chaos.training import ANEW_EVERY, EVERY_N_STEPS, Configuration, JobMode, Training

_BASELINE_LIMIT_S = 600.0
_LAST = Path("checkpoints") / "last.ckpt"


@dataclass
class JobResult:
    """The result of a job."""

    mode: str
    sizes: tuple[int, ...]  # numbers of processes of the job, in order
    precision: str  # its `--trainer.precision`
    bound: float  # the largest difference allowed
    events: list[Event] = field(default_factory=list)
    restarts: int = 0  # how often its processes were started again
    own_restarts: int = 0  # restarts that no fault has caused
    anew: int = 0  # restarts that started a new Python; the others were forked
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

    @property
    def kinds(self) -> Counter[str]:
        return Counter(event.fault.kind for event in self.events)


class BaselineRun:
    """The training without faults, which starts at once.

    Attributes:
        run: Its run folder.
        start_s: Seconds until its processes, which were forked, had done their first step.
    """

    def __init__(self, training: Training, job: TorchrunJob) -> None:
        self.training, self.job = training, job
        self.run = job.folder / "run"
        self.start_s = self.seconds = 0.0
        self._reader = _reader(job.folder)
        self._begin = time.monotonic()
        job.start(training.mode.num_processes)

    def has_ended(self) -> bool:
        """Whether it has; to be asked often."""
        self._reader.refresh()
        if self._reader.newest is not None and not self.start_s:
            self.start_s = time.monotonic() - self.job.newest[0].at_s
        if self.job.status is None:
            return False
        self.seconds = self.seconds or time.monotonic() - self._begin
        return True

    def check(self) -> None:
        """A `ConfigError` if it has failed, or still runs."""
        name, status = self.training.mode.name, self.job.status
        if status != 0:
            what = f"no end within {_BASELINE_LIMIT_S:.0f} s" if status is None else f"exit status {status}"
            words = [line[:160] for line in self.job.last_words()]
            raise ConfigError(
                "\n".join([f"{name} cannot train even without faults: {what}", *words]),
                remedy=f"see that it works: python -m lit_cifar verify --modes {name}",
            )

    @property
    def batches(self) -> Batches:
        """The ids of the global batch of every step."""
        self._reader.refresh()
        return effective(self._reader.lines)[0]


def train_baselines(trainings: Sequence[Training], folders: Sequence[Path], *, report: Report) -> list[BaselineRun]:
    """Train at full size, all side by side; a `ConfigError` if one fails without any fault."""
    with ExitStack() as stack:
        runs = [
            BaselineRun(training, stack.enter_context(_job(training, folder, has_faults=False)))
            for training, folder in zip(trainings, folders, strict=True)
        ]

        def is_over() -> bool:
            ended = [run.has_ended() for run in runs]  # each is asked
            return all(ended) or any(run.job.status for run in runs)

        wait_until(is_over, limit_s=_BASELINE_LIMIT_S, poll_s=0.1)
        for run in sorted(runs, key=lambda run: not run.job.status):  # the failed first
            run.check()
            report(f"{run.seconds:6.1f} s  {run.training.mode.name}: {run.training.num_steps} steps without faults")
    return runs


def run_trial(
    training: Training, faults: Sequence[Fault], baseline: BaselineRun, folder: Path, *, report: Report
) -> JobResult:
    """Train under faults at full size, or through all sizes, and compare the end."""
    size = training.mode.num_processes
    sizes = tuple(dict.fromkeys([size, *(fault.size for fault in faults)]))
    row = JobResult(
        training.mode.name, sizes, training.precision, bound=0.0 if training.has_same_bits else RESIZED_BOUND
    )
    run, reader, begin = folder / "run", _reader(folder), time.monotonic()
    with _job(training, folder, max_restarts=len(faults) + 5, anew_every=ANEW_EVERY) as job:
        trial = Trial(job, reader, run / "checkpoints", EVERY_N_STEPS, baseline.start_s, report)
        row.events, row.problems = trial.events, trial.problems
        try:
            trial.run(faults, size=size)
            _compare(row, reader, run, baseline)
        except TrialError as failure:
            row.problems.append(str(failure))
        row.seconds = time.monotonic() - begin
        row.restarts = reader.num_starts - 1
        row.own_restarts = max(0, row.restarts - trial.num_planned_restarts)
        row.anew = len({worker.start for worker in job.workers if worker.anew and worker.start != (1, 0)})
    return row


def _reader(folder: Path) -> SampleLogReader:
    return SampleLogReader(folder / "sample_log")


def _job(
    training: Training, folder: Path, *, anew_every: int = 0, max_restarts: int = 0, has_faults: bool = True
) -> TorchrunJob:
    (folder / "sample_log").mkdir(parents=True)

    def command(size: int) -> list[str]:
        return training.arguments(size, run=folder / "run", sample_log=folder / "sample_log", has_faults=has_faults)

    return TorchrunJob(command, folder=folder, max_restarts=max_restarts, anew_every=anew_every)


def _compare(row: JobResult, reader: SampleLogReader, run: Path, baseline: BaselineRun) -> None:
    """Fill in how the samples and the end compare with the baseline run."""
    found = audit(reader.lines, baseline=baseline.batches)
    row.repeated, row.missing, row.doubled = found.repeated, found.missing, found.doubled
    row.problems += found.problems
    row.difference, row.tensor = distance(run / _LAST, baseline.run / _LAST)
    if row.difference > row.bound:
        row.problems.append(f"{row.tensor} differs by {row.difference:.1e} at the end, allowed {row.bound:.0e}")
    row.problems += position_problems(run / _LAST, baseline.run / _LAST)
    row.problems += receipt_problems(run / "receipt.csv", baseline.run / "receipt.csv")
    if row.bound == 0.0:
        row.problems += metric_problems(run / "metrics.csv", baseline.run / "metrics.csv")


def chaos(
    modes: Sequence[JobMode], args: Sequence[str], *, num_faults: int, seed: int, folder: Path, report: Report
) -> list[JobResult]:
    """Inject so many faults into a training of each mode, with these flags of `fit`, one mode after the other.

    Most of the faults hit a job that keeps its size, the others one that is resized: there is a row for each. `seed` is
    that of kinds, moments and ranks. Everything is written to `folder`, which is empty; `report` is called with a line
    whenever something happens. A mode that cannot train even without faults is a `ConfigError`.
    """
    rows = []
    configuration = Configuration.of(args, folder=folder)
    counts = [count for count in shares(num_faults) if count]
    for mode in modes:
        trainings = [
            Training.under(configuration, mode, count, resized=number == 1) for number, count in enumerate(counts)
        ]
        folders = [folder / mode.name / ("resized" if training.resized else "equal-size") for training in trainings]
        baselines = train_baselines(trainings, [own / "baseline" for own in folders], report=report)
        for count, training, own, baseline in zip(counts, trainings, folders, baselines, strict=True):
            can_fill = CAN_FILL and (baseline.run / _LAST).stat().st_size > LEAST_BYTES
            faults = plan_for(training, count, seed=seed, full_disk=can_fill)
            rows.append(run_trial(training, faults, baseline, own, report=report))
    return rows


def plan_for(training: Training, num_faults: int, *, seed: int, full_disk: bool = True) -> list[Fault]:
    """What happens to a job: from its second checkpoint on, and until shortly before its end."""
    resized = training.resized
    return schedule_faults(
        resized_faults(num_faults) if resized else equal_size_faults(num_faults, seed=seed, full_disk=full_disk),
        seed=seed,
        sizes=training.mode.sizes if resized else training.mode.sizes[:1],
        first_step=2 * EVERY_N_STEPS + 2,
        last_step=training.num_steps - 2 * EVERY_N_STEPS,
    )
