"""Proof that `verify` can fail: mistakes are planted one by one, and each must be seen."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from tempfile import TemporaryDirectory

from rich import box
from rich.table import Table

from lit_cifar.commands.verify.bugs import BUGS, Bug
from lit_cifar.commands.verify.modes import modes
from lit_cifar.commands.verify.runs import Outcome, stop_all
from lit_cifar.commands.verify.settings import Settings
from lit_cifar.commands.verify.verifier import Report, Verifier

DEVICES = 2
STEPS = 3
TIMEOUT_S = 120.0

# A small net, in float64 where the bound is sharp. 27 images in batches of 16 make a full step, a ragged one, and one
# of the second epoch; 15 images to evaluate do not divide among two processes.
ARGS = (
    "--model.arch=resnet10",
    "--model.optimizer.lr=0.02",
    "--data.num_train=42",
    "--data.val_size=15",
    "--data.batch_size=16",
    "--trainer.precision=64-true",
    "--trainer.accelerator=cpu",
)


@dataclass(frozen=True)
class Finding:
    """What the comparison said of a planted mistake.

    Attributes:
        bug: The mistake; None where none was planted, which must pass.
        mode: The mode.
        problems: What the comparison complained about.
        finished: Whether the run came to its end: one that breaks down says nothing about the comparison.
    """

    bug: Bug | None
    mode: str
    problems: list[str]
    finished: bool

    @property
    def right(self) -> bool:
        """A mistake was caught, or its absence was seen."""
        return self.finished and bool(self.problems) == (self.bug is not None)


def self_test(*, bugs: Sequence[Bug] | None = None, report: Report = lambda line: None) -> list[Finding]:
    """Plant every mistake, by default all in `BUGS`, and compare each run as `verify` does.

    Every mode with a mistake also runs without one, which must pass: else "caught" would say nothing.
    """
    chosen = list(BUGS.values()) if bugs is None else list(bugs)
    findings = []
    with TemporaryDirectory(prefix="lit_cifar-verify-") as folder:
        for args in dict.fromkeys(bug.args for bug in chosen):
            settings = Settings.of([*ARGS, *args], devices=DEVICES, folder=Path(folder))
            verifier = Verifier(settings, STEPS, Path(folder), report, timeout_s=TIMEOUT_S)
            findings += _findings(verifier, [bug for bug in chosen if bug.args == args])
    return findings


def _findings(verifier: Verifier, bugs: Sequence[Bug]) -> list[Finding]:
    """Several runs at a time: with so small a net most of a run is its start, which uses one core."""
    known = modes(DEVICES)
    cases: list[tuple[str, Bug | None]] = [(mode, None) for mode in dict.fromkeys(bug.mode for bug in bugs)]
    cases += [(bug.mode, bug) for bug in bugs]
    references = {mode: verifier.reference(verifier.chunks_of(known[mode])) for mode, bug in cases if bug is None}
    found: dict[tuple[str, Bug | None], Finding] = {}
    with ExitStack() as stack, _workers() as pool:
        launched: dict[Future[Outcome], tuple[str, Bug | None, Path]] = {}
        for mode, bug in cases:
            folder = stack.enter_context(verifier.run_folder(mode))
            name = None if bug is None else bug.name
            launched[pool.submit(verifier.launch, known[mode], folder, bug=name)] = (mode, bug, folder)
        for future in as_completed(launched):
            mode, bug, folder = launched[future]
            outcome = future.result()
            row = verifier.judge(known[mode], outcome, folder, references[mode])
            found[mode, bug] = Finding(bug, mode, row.problems, finished=outcome.status == 0)
    return [found[case] for case in cases]


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for runs; whatever goes wrong here, the runs end at once."""
    pool = ThreadPoolExecutor(max_workers=cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        stop_all()
        pool.shutdown(wait=True)


def findings_table(findings: Sequence[Finding], *, title: str) -> Table:
    """A row for each planted mistake, with the first thing that gave it away."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
    table.add_column("planted", max_width=44)
    table.add_column("mode", no_wrap=True)
    table.add_column("seen in", max_width=54)
    table.add_column("", no_wrap=True)
    for finding in findings:
        planted = "nothing" if finding.bug is None else f"{finding.bug.name}\n[dim]{finding.bug.imitates}[/]"
        seen = finding.problems[0] if finding.problems else "-"
        table.add_row(planted, finding.mode, seen, _verdict(finding))
    return table


def _verdict(finding: Finding) -> str:
    if not finding.finished:
        word = "broke"
    elif finding.bug is None:
        word = "passed" if finding.right else "FAIL"
    else:
        word = "caught" if finding.problems else "missed"
    return f"[bold {'green' if finding.right else 'red'}]{word}[/]"
