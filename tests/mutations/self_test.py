"""Shows that `verify` can fail: mutations are planted one by one, and each must be caught."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.markup import escape
from rich.table import Column, Table

from lit_cifar.launch.forked import EndedRun
from lit_cifar.tools import terminal
from lit_cifar.tools.modes import SizedMode, sized_modes
from lit_cifar.tools.verify.configuration import EXACT, Configuration
from lit_cifar.tools.verify.judge import RESUMED, VerifiedMode
from lit_cifar.tools.verify.verifier import Case, Verifier
from tests.mutations.catalogue import OF_MODES, OF_PARTS, planting_flags
from tests.mutations.planting import Mutation

DEVICES = 2
STEPS = 4

# A small net, in float64 where the bound is sharp. 27 images in batches of 16 make a full step and a ragged one, in two
# epochs; 15 images to evaluate, in batches of 8, do not divide among two processes.
ARGS = (
    *("--model.arch=tiny", "--model.stem=imagenet", "--model.optimizer.lr=0.02", "--data.num_train=42"),
    *("--data.val_size=15", "--data.batch_size=16", "--data.eval_batch_size=8"),
    *("--trainer.accumulate_grad_batches=2", "--trainer.accelerator=cpu"),
)

# Into how many parts these batches can be cut; two parts would be added in one order only.
NUM_PARTS = 4
# With virtual replicas there is no tolerance, so bfloat16 is as good; accumulated gradients are refused.
PARTS = ("--trainer.accumulate_grad_batches=1", "--trainer.precision=bf16-mixed", f"--virtual_replicas={NUM_PARTS}")

GUARD = "SampleAuditError: "  # on stderr, where the check of samples during training has stopped a run


@dataclass(frozen=True)
class Finding:
    """What became of a mutation."""

    mutation: Mutation | None  # None where none was planted, which must pass
    mode: str
    problems: list[str]  # problems that the comparison found, or the last lines of a run that failed
    finished: bool  # whether the run ended normally
    acted: bool = False  # whether the wrong code has run
    guard: str | None = None  # the check during training that stopped the run; None if none did

    @property
    def caught_by(self) -> str | None:
        """The check that caught the mutation; None for a run that failed for another reason."""
        return "comparison" if self.finished and self.problems else self.guard

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.finished and self.guard is None:
            return "broke"
        if self.mutation is None:
            return "passed" if self.finished and not self.problems else "FAIL"
        if not self.acted:
            return "did not act"
        return "missed" if self.caught_by is None else "caught"

    @property
    def right(self) -> bool:
        """Whether a mutation was caught, or a run without one passed."""
        return self.verdict in ("caught", "passed")


def self_test(mutations: Sequence[Mutation] | None = None, *, with_parts: bool = False) -> list[Finding]:
    """Plant these mutations, by default those of modes, and compare each run as `verify` does.

    Every mode with a mutation also runs without one, which must pass: else "caught" would say nothing. `with_parts`, in
    runs of `NUM_PARTS` virtual replicas, no bit may differ; the default is what only these can have. Runs find this
    package only with the PYTHONPATH of `on_python_path`.
    """
    if mutations is None:
        mutations = OF_PARTS if with_parts else OF_MODES
    findings = []
    with TemporaryDirectory(prefix="lit_cifar-verify-") as folder:
        for args in dict.fromkeys(mutation.args for mutation in mutations):
            flags = [*ARGS, *args, f"--trainer.precision={EXACT}", *(PARTS if with_parts else ())]
            settings = Configuration.from_flags(flags, devices=DEVICES, folder=Path(folder))
            verifier = Verifier(settings, STEPS, Path(folder))
            findings += _findings(verifier, [mutation for mutation in mutations if mutation.args == args])
    return findings


def _findings(verifier: Verifier, mutations: Sequence[Mutation]) -> list[Finding]:
    """Several runs at a time: with so small a net most of a run is its start, which uses one core."""
    settings, folder = verifier.settings, verifier.folder
    planted: list[tuple[SizedMode, Mutation | None]] = []
    for mode, own in _by_mode(mutations, with_parts=settings.num_parts is not None):
        planted += [(mode, None), *((mode, mutation) for mutation in own)]
    compared = verifier.compare([_case(mode, mutation, folder) for mode, mutation in planted])
    return [_finding(mutation, *each, folder) for (_, mutation), each in zip(planted, compared, strict=True)]


def _by_mode(mutations: Sequence[Mutation], *, with_parts: bool) -> Iterator[tuple[SizedMode, list[Mutation]]]:
    for name, devices in dict.fromkeys((mutation.mode, mutation.devices) for mutation in mutations):
        mode = sized_modes(devices)[name]
        own = [mutation for mutation in mutations if (mutation.mode, mutation.devices) == (name, devices)]
        yield mode.with_parts() if with_parts else mode, own


def _case(mode: SizedMode, mutation: Mutation | None, folder: Path) -> Case:
    if mutation is None:
        return Case(mode)
    acted = folder / mutation.name
    acted.mkdir()
    return Case(mode, planting_flags(mutation, acted), title=f"{mode.name} with {mutation.name}")


def _finding(mutation: Mutation | None, row: VerifiedMode, ended: EndedRun, folder: Path) -> Finding:
    # What only a resumed run breaks down on has not been compared; what was found before stays found.
    found_before = row.processes is not None and any(not problem.startswith(RESUMED) for problem in row.problems)
    finished = ended.status == 0 or found_before
    stderr = [] if finished else ended.stderr.splitlines()
    said = [line.strip() for line in stderr if GUARD in line]
    guard = "sample audit" if said else None
    seen = said[-1:] or row.problems or stderr[-1:]
    acted = mutation is not None and any((folder / mutation.name).iterdir())
    return Finding(mutation, row.mode, seen, finished, acted=acted, guard=guard)


def findings_table(findings: Sequence[Finding]) -> Table:
    columns = [Column("planted", max_width=40), Column("mode", no_wrap=True), Column("seen in", max_width=46)]
    columns += [Column("caught by", no_wrap=True), Column("", no_wrap=True)]
    table = terminal.table("Planted mistakes", columns)
    for finding in findings:
        mutation = finding.mutation
        planted = "nothing" if mutation is None else f"{mutation.name}\n[dim]{mutation.imitates}[/]"
        seen = finding.problems[0] if finding.problems else "-"
        caught_by = "-" if mutation is None else finding.caught_by or "-"
        verdict = f"[bold {'green' if finding.right else 'red'}]{finding.verdict}[/]"
        table.add_row(planted, finding.mode, escape(seen), caught_by, verdict)
    return table
