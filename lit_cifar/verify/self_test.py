"""Shows that `verify` can fail: mistakes are planted one by one, and each must be caught."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich import box
from rich.markup import escape
from rich.table import Table

from lit_cifar.errors import ConfigError
from lit_cifar.modes import Variant, variants
from lit_cifar.verify.configuration import Configuration
from lit_cifar.verify.judge import RESUMED
from lit_cifar.verify.launcher import Launcher, Report
from lit_cifar.verify.planted_in_parts import NO_PLACE
from lit_cifar.verify.planting import Bug, bug_at, bugs_of
from lit_cifar.verify.record import Record
from lit_cifar.verify.runs import quiet
from lit_cifar.verify.verifier import Case, Compared, Verifier

OF_ALL, OF_PARTS_ALONE = "lit_cifar.verify.planted_mistakes", "lit_cifar.verify.planted_in_parts"
DEVICES = 2
STEPS = 4
TIMEOUT_S = 300.0

# A small net, in float64 where the bound is sharp. 27 images in batches of 16 make a full step and a ragged one, in two
# epochs; 15 images to evaluate, in batches of 8, do not divide among two processes.
ARGS = (
    "--model.arch=tiny",
    "--model.stem=imagenet",
    "--model.optimizer.lr=0.02",
    "--data.num_train=42",
    "--data.val_size=15",
    "--data.batch_size=16",
    "--data.eval_batch_size=8",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.precision=64-true",
    "--trainer.accelerator=cpu",
)

# Into how many parts these batches can be cut; two parts would be added in one order only.
NUM_PARTS = 4
# With virtual replicas there is no tolerance, so bfloat16 is as good; accumulated gradients are refused.
OF_PARTS = ("--trainer.accumulate_grad_batches=1", "--trainer.precision=bf16-mixed")

COMPARISON = "comparison"
GUARDS = {"SampleAuditError: ": "data receipt"}  # checks during training that stop a run, by their words on stderr


@dataclass(frozen=True)
class PlantedResult:
    """The result of a planted mistake."""

    bug: Bug | None  # the mistake; None where none was planted, which must pass
    mode: str
    problems: list[str]  # problems that the comparison found, or the last lines of a run that failed
    finished: bool  # whether the run ended normally
    acted: bool = False  # whether the wrong code has run
    guard: str | None = None  # the check during training that stopped the run; None if none did
    no_place: str | None = None  # why the mistake cannot be made, so that nothing has run; None if it can

    @property
    def caught_by(self) -> str | None:
        """The check that caught the mistake; None for a run that failed for another reason."""
        return COMPARISON if self.finished and self.problems else self.guard

    @property
    def right(self) -> bool:
        """Whether a planted mistake was caught, or a run without one passed, or there was nothing to run."""
        if self.no_place is not None:
            return True
        if self.bug is None:
            return self.finished and not self.problems
        return self.acted and self.caught_by is not None


def self_test(
    *, bugs: Sequence[str] | None = None, num_parts: int | None = None, report: Report = lambda line: None
) -> list[PlantedResult]:
    """Plant the mistakes at these paths ("package.module:name"), by default all, and compare each run as `verify` does.

    Every mode with a mistake also runs without one, which must pass: else "caught" would say nothing. With `num_parts`
    virtual replicas those of `planted_in_parts` are planted too, and no bit may differ.
    """
    if num_parts not in (None, NUM_PARTS):
        raise ConfigError(
            f"--virtual_replicas={num_parts}, but the small batches of --self-test have {NUM_PARTS} parts",
            remedy=f"pass --virtual_replicas={NUM_PARTS}",
        )
    catalogue = bugs_of(OF_ALL) if num_parts is None else bugs_of(OF_ALL) | bugs_of(OF_PARTS_ALONE)
    chosen = catalogue if bugs is None else {path: bug_at(path) for path in bugs}
    parts = [] if num_parts is None else [*OF_PARTS, f"--virtual_replicas={num_parts}"]
    findings = []
    with TemporaryDirectory(prefix="lit_cifar-verify-") as folder:
        for args in dict.fromkeys(bug.args for bug in chosen.values()):
            settings = Configuration.of([*ARGS, *args, *parts], devices=DEVICES, folder=Path(folder))
            launcher = Launcher(settings, STEPS, Path(folder), report, timeout_s=TIMEOUT_S)
            findings += _findings(Verifier(launcher), {path: bug for path, bug in chosen.items() if bug.args == args})
    return findings


def _findings(verifier: Verifier, bugs: Mapping[str, Bug]) -> list[PlantedResult]:
    """Several runs at a time: with so small a net most of a run is its start, which uses one core."""
    planted: list[Bug | None] = []
    cases: list[Case] = []
    nowhere: list[PlantedResult] = []
    for name, devices in dict.fromkeys((bug.mode, bug.devices) for bug in bugs.values()):
        mode = variants(devices)[name]
        own = {path: bug for path, bug in bugs.items() if (bug.mode, bug.devices) == (name, devices)}
        if verifier.launcher.settings.num_parts is not None:
            mode = mode.with_parts()
            reasons = _reasons(mode, own.values(), verifier.launcher.settings)
            nowhere += [
                PlantedResult(bug, name, [], finished=False, no_place=reasons[bug.name])
                for bug in own.values()
                if bug.name in reasons
            ]
            own = {path: bug for path, bug in own.items() if bug.name not in reasons}
        if own:
            planted += [None, *own.values()]
            cases += [Case(mode), *(Case(mode, path) for path in own)]
    found = {compared.number: _finding(planted[compared.number], compared) for compared in verifier.compare(cases)}
    return [*(found[number] for number in range(len(cases))), *nowhere]


def _reasons(mode: Variant, bugs: Iterable[Bug], settings: Configuration) -> dict[str, str]:
    """Why virtual replicas leave no place for a mistake, by its name; all mistakes of a mode that is refused."""
    data = settings.data()
    try:
        with quiet():
            mode.check(settings.module(), data, settings.train_sampler(data), num_parts=settings.num_parts)
    except ConfigError as error:
        return {bug.name: error.problem for bug in bugs}
    return {bug.name: NO_PLACE[bug.name] for bug in bugs if bug.name in NO_PLACE}


def _finding(bug: Bug | None, compared: Compared) -> PlantedResult:
    # What only a resumed run breaks down on has not been compared; what was found before stays found.
    row = compared.row
    found_before = bool(row.losses) and any(not problem.startswith(RESUMED) for problem in row.problems)
    finished = compared.outcome.status == 0 or found_before
    stderr = [] if finished else compared.outcome.stderr.splitlines()
    said = [(line, words) for line in stderr for words in GUARDS if words in line]
    guard = GUARDS[said[-1][1]] if said else None
    seen = [said[-1][0].strip()] if said else compared.row.problems
    return PlantedResult(bug, compared.row.mode, seen, finished, acted=Record(compared.folder).acted, guard=guard)


def findings_table(findings: Sequence[PlantedResult], *, title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
    table.add_column("planted", max_width=40)
    table.add_column("mode", no_wrap=True)
    table.add_column("seen in", max_width=46)
    table.add_column("caught by", no_wrap=True)
    table.add_column("", no_wrap=True)
    for finding in findings:
        planted = "nothing" if finding.bug is None else f"{finding.bug.name}\n[dim]{finding.bug.imitates}[/]"
        seen = finding.no_place or (finding.problems[0] if finding.problems else "-")
        caught_by = "-" if finding.bug is None else finding.caught_by or "-"
        table.add_row(planted, finding.mode, escape(seen), caught_by, _verdict(finding))
    return table


def _verdict(finding: PlantedResult) -> str:
    if finding.no_place is not None:
        return "no place"
    if not finding.finished and finding.guard is None:
        word = "broke"
    elif finding.bug is None:
        word = "passed" if finding.right else "FAIL"
    elif not finding.acted:
        word = "did not act"
    else:
        word = "caught" if finding.right else "missed"
    return f"[bold {'green' if finding.right else 'red'}]{word}[/]"
