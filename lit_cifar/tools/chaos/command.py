"""`python -m lit_cifar chaos`: trains without faults, trains with faults, and compares the two."""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

from rich.table import Table

from lit_cifar.checkpoint.atomic import LAST
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.checkpoint.sample_audit import AuditRecord
from lit_cifar.errors import ConfigError
from lit_cifar.tools import terminal
from lit_cifar.tools.chaos.audit import RESIZED_BOUND, SampleLogReader, audit, distance, effective, metric_problems
from lit_cifar.tools.chaos.faults import EQUAL_SIZE, LEAST_BYTES, shares
from lit_cifar.tools.chaos.job import Job, wait_until
from lit_cifar.tools.chaos.training import Training, chosen_modes, configured
from lit_cifar.tools.chaos.trial import Event, Trial, TrialError

_ENOUGH = next(number for number in count(1) if shares(number)[0] >= len(EQUAL_SIZE))
_DESCRIPTION = f"""\
Train under torchrun without faults, and then again while ranks are killed, terminated and stopped, the newest
checkpoint is truncated, a full disk is simulated and the job is resized, at random moments and during saves. In the end
every sample must have counted as in the uninterrupted run, and parameters and optimizer state must be the same: bitwise
where the job kept its size, within 1e-5, in float64, where it was resized. With --virtual_replicas=V the resized job
goes to one process and to twice as many in another mode, and must end bitwise too. All on the CPU.
With --launcher COMMAND in place of torchrun no job is resized; under Ray nodes are killed as well.
Every other argument is passed on to `fit`, e.g. --config FILE. Without --config a small ResNet trains on synthetic
images. The training is as long as its faults need.
{_ENOUGH} faults or more include every kind."""
_BASELINE_LIMIT_S = 1800.0
_LAST = Path("run", "checkpoints", LAST)


def main(args: list[str]) -> int:
    """Run, print a row for the job that keeps its size and one for the resized job; return 0 if nothing was lost."""
    options, rest = chaos_parser().parse_known_args(args)
    if options.faults < 1 or options.seed < 0:
        problem = f"--faults={options.faults} --seed={options.seed}: faults must be 1 or more, and the seed 0 or more"
        raise ConfigError(problem, remedy="the defaults are 20 and 0")
    modes = chosen_modes(options.modes.split(","), devices=options.devices, num_parts=options.virtual_replicas)
    target = terminal.writable(options.json)
    record = terminal.about() | {"seed": options.seed, "faults": options.faults, "devices": options.devices}
    record |= {"virtual_replicas": options.virtual_replicas, "launcher": options.launcher, "kills": options.kills}
    terminal.exit_orderly_when_terminated()
    begin = time.monotonic()
    kept = None if options.output is None else terminal.empty_folder(options.output).resolve()
    rows = []
    with tempfile.TemporaryDirectory(prefix="lit_cifar-chaos-") as temporary:
        folder = kept or Path(temporary)
        parts = (options.faults, 0) if options.launcher or options.kills else shares(options.faults)
        must_draw_alike = parts[1] > 0 and options.virtual_replicas is None
        flags, precision, every = configured(rest, folder=folder, must_draw_alike=must_draw_alike)
        for mode in modes:
            for name, number in zip(("equal-size", "resized"), parts, strict=True):
                training = Training(
                    flags, precision, mode, number, every, name == "resized", options.launcher, options.kills
                )
                rows += [_run(training, folder / mode.name / name, seed=options.seed)] if number else []
    passed = all(row.passed for row in rows)
    _print(rows, options)
    found = [asdict(row) | {"passed": row.passed} for row in rows]
    seconds = time.monotonic() - begin
    terminal.write_json(target, record | {"rows": found, "passed": passed, "seconds": seconds})
    return 0 if passed else 1


def chaos_parser() -> argparse.ArgumentParser:
    parser = terminal.CommandParser("chaos", description=_DESCRIPTION)
    number, text = partial(parser.add_argument, type=int), parser.add_argument
    number("--faults", default=20, metavar="K", help="Faults for each mode (default: 20).")
    number("--seed", default=0, metavar="S", help="Seed of the kinds, moments and ranks of faults (default: 0).")
    text("--modes", default="ddp", metavar="A,B", help="Modes to train in (default: ddp).")
    number("--devices", default=2, metavar="N", help="Devices of each mode (default: 2).")
    number("--virtual_replicas", metavar="V", help="Train with so many virtual replicas: 4 for 1, 2, 4 processes.")
    text(
        "--launcher",
        type=terminal.launcher_words,
        default=(),
        metavar="COMMAND",
        help='What starts the processes, on this machine, e.g. "python -m lit_cifar ray --nodes=2 --max_failures=99".',
    )
    text("--kills", action="store_true", help="Only kill ranks, of a job that keeps its size.")
    text("--json", metavar="FILE", help="Write all faults, results, versions and hardware to this file.")
    text("--output", metavar="FOLDER", help="Keep logs, sample logs and checkpoints there. Else nothing is kept.")
    return parser


@dataclass
class JobResult:
    mode: str
    sizes: tuple[int, ...]  # numbers of processes of the job, in order
    precision: str  # value of `--trainer.precision`
    bound: float  # the largest difference allowed
    events: list[Event] = field(default_factory=list)
    restarts: int = 0  # number of restarts of the job's processes
    repeated: int = 0  # optimizer steps that were run again after a restart
    missing: int | None = None  # samples that no step of an epoch has counted
    doubled: int | None = None  # samples that an epoch counts too often
    # The largest difference from the end of the baseline run; None if the job did not end.
    difference: float | None = None
    tensor: str | None = None  # the tensor with the largest difference
    seconds: float = 0.0  # duration of the job, without the baseline run
    problems: list[str] = field(default_factory=list)  # the mistakes; empty for a PASS

    @property
    def passed(self) -> bool:
        return not self.problems


def _run(training: Training, folder: Path, *, seed: int) -> JobResult:
    baseline = folder / "baseline"
    _train_baseline(training, baseline)
    can_fill = (baseline / _LAST).stat().st_size > LEAST_BYTES
    faults, size = training.faults(seed=seed, full_disk=can_fill), training.mode.num_processes
    sizes = tuple(dict.fromkeys([size, *(fault.size for fault in faults)]))
    row = JobResult(training.mode.name, sizes, training.precision, 0.0 if training.has_same_bits else RESIZED_BOUND)
    reader, begin = SampleLogReader(folder / "sample_log"), time.monotonic()
    with _job(training, folder, max_restarts=2 * len(faults) + 5) as job:
        checkpoints = folder / "run" / "checkpoints"
        trial = Trial(job, reader, checkpoints, training.every_n_steps, row.events, row.problems)
        try:
            trial.run(faults, size=size)
            _compare(row, reader, folder, baseline)
        except TrialError as failure:
            row.problems.append(str(failure))
    row.seconds, row.restarts = time.monotonic() - begin, max(0, reader.num_starts - 1)
    return row


def _train_baseline(training: Training, folder: Path) -> None:
    """Train at full size. Raise a `ConfigError` if that fails without any fault."""
    name = training.mode.name
    with _job(training, folder, max_restarts=0, has_faults=False) as job:
        job.start(training.mode.num_processes)
        wait_until(lambda: job.status is not None, limit_s=_BASELINE_LIMIT_S, poll_s=0.1)
        if status := job.status:
            problem = "\n".join([f"{name} cannot train even without faults: exit status {status}", *job.last_words()])
            raise ConfigError(problem, remedy=f"see that it works: python -m lit_cifar verify --modes {name}")
        if status is None:
            raise ConfigError(
                f"{name} does not train {training.num_steps} steps within {_BASELINE_LIMIT_S:.0f} s without faults",
                remedy="pass fewer --faults, a smaller network or smaller batches",
            )
    lines = _read(folder).lines
    if (num_steps := len({line.step for line in lines})) < training.num_steps:
        raise ConfigError(
            f"the configuration ends a run after {num_steps} of {training.num_steps} steps",
            remedy="leave out what does, e.g. --trainer.max_time, --trainer.fast_dev_run or an EarlyStopping",
        )
    if (started := len({line.rank for line in lines})) != training.mode.num_processes:
        problem = f"--launcher has started {started} processes, and {name} here has {training.mode.num_processes}"
        raise ConfigError(problem, remedy="have it start as many, or pass other --devices")
    terminal.say(f"{name}: {training.num_steps} steps without faults")


def _read(folder: Path) -> SampleLogReader:
    reader = SampleLogReader(folder / "sample_log")
    reader.refresh()
    return reader


def _job(training: Training, folder: Path, *, max_restarts: int, has_faults: bool = True) -> Job:
    (folder / "sample_log").mkdir(parents=True)
    command = partial(training.arguments, folder=folder, has_faults=has_faults)
    return Job(command, folder=folder, max_restarts=max_restarts, launcher=training.launcher)


def _compare(row: JobResult, reader: SampleLogReader, folder: Path, baseline: Path) -> None:
    """Fill in the differences of the samples and the end from the baseline run."""
    found = audit(reader.lines, baseline=effective(_read(baseline).lines)[0])
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


_NAMES = {
    "node": "node killed",
    "kill": "SIGKILL",
    "term": "SIGTERM",
    "stop": "SIGSTOP",
    "resize": "resized",
    "truncate": "truncated",
}


def _print(rows: list[JobResult], options: argparse.Namespace) -> None:
    out = terminal.console()
    out.print(result_table(rows, title=f"{options.faults} faults for each mode, seed {options.seed}"))
    for row in rows:
        for problem in row.problems[:5]:
            out.print(f"{row.mode} on {', '.join(map(str, row.sizes))}: {problem}", markup=False)
    if options.output is None and not all(row.passed for row in rows):
        out.print(f"to keep the logs, run it again with --seed {options.seed} --output FOLDER", markup=False)


def result_table(rows: Sequence[JobResult], *, title: str) -> Table:
    numbers = ("restarts", "steps\nrepeated", "ids\nmissing", "ids\ndoubled", "difference", "kill to step", "time")
    found = terminal.table(title, ("mode", "processes", "faults"), numbers=numbers)
    found.add_column("", no_wrap=True)
    for row in rows:
        kinds, during_saves = Counter(it.fault.kind for it in row.events), sum(it.during_save for it in row.events)
        faults = ", ".join(f"{number} {_NAMES.get(kind, 'disk full')}" for kind, number in kinds.items())
        found.add_row(
            row.mode,
            f"{', '.join(map(str, row.sizes))}\n[dim]{row.precision}[/]",
            f"{kinds.total()}: {faults}\n[dim]{during_saves} during a save[/]",
            *("-" if each is None else str(each) for each in (row.restarts, row.repeated, row.missing, row.doubled)),
            _difference(row),
            _recovery(row),
            f"{row.seconds:.0f} s",
            "[bold green]PASS[/]" if row.passed else "[bold red]FAIL[/]",
        )
    return found


def _difference(row: JobResult) -> str:
    if row.difference is None:
        return "-"
    shown = f"{row.difference:.1e}" if row.difference else "0"
    bound = f"<= {row.bound:.0e}" if row.bound else "bitwise"
    return f"{shown if row.difference <= row.bound else f'[red]{shown}[/]'}\n[dim]{bound}[/]"


def _recovery(row: JobResult) -> str:
    """Seconds from a SIGKILL to the next finished step: the median and the most."""
    kills = [event for event in row.events if event.fault.kind == "kill" and event.fault.aim != "start"]
    seconds = [event.away_s for event in kills if event.away_s is not None]
    return f"{median(seconds):.2f} s\n[dim]up to {max(seconds):.2f} s[/]" if seconds else "-"
