"""`python -m lit_cifar verify`: from its arguments to the row of each mode, the printed table and the exit status."""

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from rich.table import Column, Table

from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.launch.signals import EXIT_REFUSED
from lit_cifar.models.ghost_batchnorm import normalises_batches
from lit_cifar.reporting.output import without_banners
from lit_cifar.tools import terminal
from lit_cifar.tools.modes import SizedMode, chosen
from lit_cifar.tools.terminal import say
from lit_cifar.tools.verify.judge import Verdict, VerifiedMode, judge
from lit_cifar.tools.verify.launcher import Configuration, Launcher, launched, placed
from lit_cifar.tools.verify.record import EXACT_BOUND, KINDS, LOGITS, Bounds, Record, differences, largest
from lit_cifar.tools.verify.runs import Outcome, workers

_DESCRIPTION = """\
Train a configuration for a few steps in each mode, and compare it step by step with the single-device computation that
the mode equals. Compared are losses, parameters, BatchNorm buffers, optimizer state, sample ids, logged metrics, the
logits of evaluations, checkpoints, and the same run resumed before its last step. Processes that must hold the same
values are compared bit for bit.
Every other argument is passed on to `fit`, e.g. --config FILE, --model.arch=resnet34, --trainer.precision=bf16-mixed.
Without --config it is `tiny`, a narrow ResNet, on synthetic images in float64, where nothing may differ by more than
1e-9. In float32 and bfloat16, where rounding could explain a difference, numbers are compared in a run in float64."""
_EPILOG = """\
examples:
  python -m lit_cifar verify --modes=ddp,pp,tp
  python -m lit_cifar verify --modes=fsdp2 --devices=4 --config=RUN_FOLDER/config.yaml

exit status:
  0  at least one mode was compared, and all that were have passed
  1  a mode was compared, and it is wrong
  2  something that was asked for cannot work
  3  no verdict: a run ended by an error of its own, or there was nothing to compare"""

RULES = {"float64": EXACT_BOUND}
NO_VERDICT = 3  # exit status where nothing is known to be wrong, but not all that ran could be compared
_SMALL = 1e-6  # larger differences are not taken for rounding, whatever it does
_NUM_SHOWN = 5  # most findings of a mode that are shown
_COLUMNS = (*KINDS, LOGITS)
_SHOWN: dict[Verdict, str] = {
    "passed": "[bold green]PASS[/]",
    "failed": "[bold red]FAIL[/]",
    "abstained": "[bold yellow]ABSTAIN[/]",
    "crashed": "[bold red]CRASH[/]",
}

RANDOM = (
    "not judged: the network draws random numbers in training, as dropout does, and with several parts of a batch it "
    "draws others than one device; pass --virtual_replicas=2 or more, with which all modes draw the same"
)

ILL_CONDITIONED = (
    "not judged: last bits of the weights change one device's steps so much that rounding explains differences up to "
    "{:.0e}, as where BatchNorm normalises few values; pass a larger --data.batch_size, or larger images"
)

NOT_IN_FLOAT64 = "its numbers are not judged, because it does not run in float64"


def main(args: list[str]) -> int:
    """Verify, print, and return the exit status, which `--help` lists."""
    options, rest = verify_parser().parse_known_args(args)
    target = terminal.writable(options.json)
    record = terminal.about() | {"rules": RULES}
    terminal.exit_orderly_when_terminated()
    torch.set_num_threads(1)  # the other cores are for the runs
    content = _verified(options, rest)
    terminal.write_json(target, record | content)
    return int(content["exit_status"])


def verify_parser() -> argparse.ArgumentParser:
    parser = terminal.CommandParser("verify", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--modes", default="all", metavar="A,B", help="Modes to verify (default: all).")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="Devices of each mode (default: 2).")
    parser.add_argument("--steps", type=int, default=4, metavar="K", help="Optimizer steps of each run (default: 4).")
    parser.add_argument(
        "--virtual_replicas", type=int, metavar="V", help="Compare bit for bit: V parts of a batch in every mode."
    )
    parser.add_argument(
        "--launcher",
        type=terminal.launcher_words,
        default=(),
        metavar="COMMAND",
        help='Have it start the processes of each mode, e.g. "python -m lit_cifar ray --nodes=2".',
    )
    parser.add_argument("--json", metavar="FILE", help="Write all results, versions and hardware to this file.")
    return parser


def _verified(options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    if options.virtual_replicas is not None:
        rest = [*rest, f"--virtual_replicas={options.virtual_replicas}"]
    sizes = {"devices": options.devices, "steps": options.steps}
    rows = verify(options.modes.split(","), **sizes, args=rest, launcher=options.launcher)
    out = terminal.console()
    out.print(verdict_table(rows, title=f"{options.steps} steps, compared one by one"))
    for row in rows:
        for problem in row.problems[:_NUM_SHOWN]:
            out.print(f"{row.mode}: {problem}", markup=False)
        if len(row.problems) > _NUM_SHOWN:
            out.print(f"{row.mode}: {len(row.problems) - _NUM_SHOWN} more findings: see --json FILE", markup=False)
    found = [asdict(row) | {"passed": row.passed} for row in rows]
    content = sizes | {"launcher": options.launcher, "rows": found}
    return content | {"passed": not exit_status(rows), "exit_status": exit_status(rows)}


def exit_status(rows: Sequence[VerifiedMode]) -> int:
    """0 if a mode passed and none failed or crashed, 1 if one was compared and is wrong, else `NO_VERDICT`."""
    outcomes = {row.outcome for row in rows}
    if "failed" in outcomes:
        return 1
    return 0 if "passed" in outcomes and "crashed" not in outcomes else NO_VERDICT


def verdict_table(rows: Sequence[VerifiedMode], *, title: str) -> Table:
    """A row for each mode, with its bound below each of the largest differences. It fits 120 columns."""
    columns = (Column("mode", no_wrap=True), Column("proc.", justify="right"), Column("equals", max_width=33))
    table = terminal.table(title, columns, numbers=(*_COLUMNS, "time"))
    table.add_column("", no_wrap=True)
    for row in rows:
        processes = "-" if row.processes is None else str(row.processes)
        if row.nodes is not None and row.nodes > 1:
            processes += f"\n[dim]{row.nodes} nodes[/]"
        cells = [_cell(row, kind) for kind in _COLUMNS]
        table.add_row(row.mode, processes, row.equals, *cells, f"{row.seconds:.0f} s", _SHOWN[row.outcome])
    return table


def _cell(row: VerifiedMode, kind: str) -> str:
    if kind not in row.differences:
        return "-"
    value, bound = row.differences[kind], row.tolerance[kind]
    shown = f"{value:.1e}" if value else "0"
    return f"{shown if value <= bound else f'[red]{shown}[/]'}\n[dim]<= {f'{bound:.1e}' if bound else '0'}[/]"


def verify(
    names: Sequence[str], *, devices: int = 2, steps: int = 4, args: Sequence[str] = (), launcher: tuple[str, ...] = ()
) -> list[VerifiedMode]:
    """Compare modes, "all" for every one, with one device: a row for each.

    A mode has so many `devices`: GPUs, or on the CPU processes or virtual devices of one process. `args` are flags of
    `fit`; by default it is `tiny` on synthetic images, in float64. A mode called by its name that cannot run so is a
    `ConfigError`; "all" leaves it out. `launcher`, the words before `fit`, starts the processes of each mode, as many
    as the mode has.
    """
    if steps < 2:
        raise ConfigError(f"--steps={steps} leaves no step before a resume", remedy="pass --steps 2 or more")
    wanted, leave_out = chosen(list(names), devices=devices), "all" in names
    # Modes are sized by Trainers of the CPU, of which Lightning warns where there is a GPU.
    with without_banners(), tempfile.TemporaryDirectory(prefix="lit_cifar-verify-") as folder:
        settings = Configuration.of([*args], devices=devices, folder=Path(folder), launcher=launcher)
        verifier = Verifier(Launcher(settings, steps, Path(folder)))
        return verify_modes(verifier, [*_possible(wanted, settings, leave_out=leave_out)], leave_out=leave_out)


def _possible(wanted: Sequence[SizedMode], settings: Configuration, *, leave_out: bool) -> Iterator[SizedMode]:
    """The modes that can run with these sizes. The reason for leaving out one is printed, or else raised."""
    module, data = settings.module(), settings.data()
    sampler = settings.train_sampler(data)
    for mode in wanted if settings.num_parts is None else [mode.with_parts() for mode in wanted]:
        try:
            on = launched(mode) if settings.launcher else placed(mode, num_gpus=settings.num_gpus)
            on.check(module, data, sampler, num_parts=settings.num_parts)
        except ConfigError as error:
            if not leave_out:
                raise
            say(f"left out {mode.name}: {error.problem}")
        else:
            if on != mode:
                say(f"on one GPU: {mode.name}")
            yield on


def verify_modes(verifier: "Verifier", wanted: Sequence[SizedMode], *, leave_out: bool = False) -> list[VerifiedMode]:
    """Rows in the order of `wanted`. Flags that a run refuses are a `ConfigError`, no failed proof; or left out."""
    rows = {mode.name: row for mode in wanted if (row := verifier.abstained(mode))}
    for compared in verifier.compare([Case(mode) for mode in wanted if mode.name not in rows]):
        if compared.outcome.status != EXIT_REFUSED:
            rows[compared.row.mode] = compared.row
        elif leave_out:
            say(f"left out {compared.row.mode}: {compared.outcome.refusal.problem}")
        else:
            raise compared.outcome.refusal
    return [rows[mode.name] for mode in wanted if mode.name in rows]


@dataclass(frozen=True)
class Case:
    mode: SizedMode
    flags: tuple[str, ...] = ()  # further flags of `fit`, for the runs of the mode alone
    title: str | None = None  # title of its runs, if not the mode's name


@dataclass(frozen=True)
class Compared:
    number: int  # number of the case
    row: VerifiedMode
    outcome: Outcome


@dataclass(frozen=True)
class Verifier:
    """Compares modes under the launcher's configuration."""

    launcher: Launcher

    def compare(self, cases: Sequence[Case]) -> Iterator[Compared]:
        """Run and judge each case, and yield results as they are known.

        In float32 and bfloat16 rounding is magnified from step to step, and could explain any difference. A case in
        which nothing else was wrong is run once more in float64, whose numbers it then has.
        """
        settings = self.launcher.settings
        right: dict[int, Compared] = {}
        for compared in self._compare(cases):
            if settings.is_exact or compared.row.outcome in ("failed", "crashed"):
                yield compared
            else:
                right[compared.number] = compared
        if not right:
            return
        numbers = sorted(right)
        say("once more in float64, where rounding is no excuse: " + ", ".join(cases[it].mode.name for it in numbers))
        in_float64 = Verifier(replace(self.launcher, settings=settings.in_float64()))
        try:
            for again in in_float64._compare([cases[number] for number in numbers]):
                before = right.pop(numbers[again.number])
                again.row.seconds += before.row.seconds
                yield replace(again, number=before.number)
        except ConfigError as error:  # one device cannot
            for compared in right.values():
                compared.row.outcome = "abstained"
                compared.row.problems.append(f"{NOT_IN_FLOAT64}: {error.problem}")
                yield compared

    def _compare(self, cases: Sequence[Case]) -> Iterator[Compared]:
        """Run each case and the references that they need, several at a time.

        A worker judges what it has run before it runs the next: records are large, and must not pile up on the disk. So
        each reference is forgotten as soon as its last case has been judged.
        """
        settings = self.launcher.settings
        chunks = [self.ghost_batches_of(case.mode) for case in cases]
        waiting = Counter(chunks)
        judging = Lock()  # the precision in which an evaluation is repeated is set for all threads

        references: dict[GhostBatches, Future[Record]] = {}

        def compared(number: int) -> Compared:
            case = cases[number]
            folder = self.launcher.new_folder(case.mode.name)
            outcome = self.launcher.run_mode(case.mode, folder, title=case.title or case.mode.name, more=case.flags)
            row = VerifiedMode(case.mode.name, settings.in_words(chunks[number]))
            reference = references[chunks[number]].result()
            with judging:
                judge(row, outcome, Record(folder), reference, settings)
                far = max(row.differences.values(), default=0.0)
                if row.outcome == "failed" and settings.num_parts is None and EXACT_BOUND < far < _SMALL:
                    bound = self._rounding(chunks[number], reference)
                    wide = replace(row, tolerance=bound, problems=[], losses=[], expected_losses=[])
                    judge(wide, outcome, Record(folder), reference, settings)
                    if not wide.problems:
                        row.outcome, row.problems = "abstained", [ILL_CONDITIONED.format(max(wide.tolerance.values()))]
            shutil.rmtree(folder)
            return Compared(number, row, outcome)

        # Modes whose processes import everything anew come first: the last ones have nothing beside them.
        slowest_first = sorted(range(len(cases)), key=lambda number: cases[number].mode.name != "ddp_spawn")
        launched: list[Future[Compared]] = []
        with workers(settings.num_at_once) as pool:
            for key in dict.fromkeys(chunks[number] for number in slowest_first):
                references[key] = pool.submit(self.launcher.run_alone, f"reference: {settings.in_words(key)}", key)
                numbers = [number for number in slowest_first if chunks[number] == key]
                launched += [pool.submit(compared, number) for number in numbers]
            for done in as_completed(launched):
                yield done.result()
                key = chunks[done.result().number]
                waiting[key] -= 1
                if not waiting[key]:
                    shutil.rmtree(references.pop(key).result().folder)

    def _rounding(self, chunks: GhostBatches, reference: Record) -> Bounds:
        """Bounds within which a difference could be rounding: what last bits of the weights change on one device."""
        settings = self.launcher.settings
        more = ["--trainer.callbacks+=lit_cifar.tools.verify.recorder.LastBits"]
        record = self.launcher.run_alone(f"rounding: {settings.in_words(chunks)}", chunks, more=more)
        bounds = settings.bounds
        for number in reference.steps:
            for kind, value in largest(differences(record.step(number), reference.step(number))).items():
                bounds[kind] = max(bounds.get(kind, 0.0), value)
        shutil.rmtree(record.folder)
        return bounds

    def ghost_batches_of(self, mode: SizedMode) -> GhostBatches:
        """The chunks that the mode normalises together; equal for all without BatchNorm, or with virtual replicas."""
        if not self._normalises_batches or self.launcher.settings.num_parts is not None:
            return GhostBatches()
        return mode.ghost_batches(accumulation=self.launcher.settings.accumulation)

    def abstained(self, mode: SizedMode) -> VerifiedMode | None:
        """The row of a mode whose random numbers differ from one device's, so that nothing would be known."""
        settings = self.launcher.settings
        if settings.num_parts is not None or not settings.draws_random_numbers:
            return None
        whole = GhostBatches.of(mode.layout(), accumulation=settings.accumulation) == GhostBatches()
        if whole and mode.num_processes == 1:  # a batch passes as on one device, with the same draws
            return None
        return VerifiedMode(mode.name, settings.in_words(self.ghost_batches_of(mode)), problems=[RANDOM])

    @cached_property
    def _normalises_batches(self) -> bool:
        """Whether the output for an image depends on the images that pass the network with it."""
        return normalises_batches(self.launcher.settings.module().network)
