"""`python -m lit_cifar verify`: from its arguments to the row of each mode, the printed table and the exit status."""

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
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
from lit_cifar.reporting.run_folder import process_rank
from lit_cifar.tools import terminal
from lit_cifar.tools.modes import SizedMode, chosen
from lit_cifar.tools.terminal import say
from lit_cifar.tools.verify.judge import Reference, Verdict, VerifiedMode, judge
from lit_cifar.tools.verify.launcher import EXACT, Configuration, Launcher, launched, placed
from lit_cifar.tools.verify.record import (
    EXACT_BOUND,
    FLOOR_ULP,
    KINDS,
    LOGITS,
    NOISE_FACTOR,
    SAME_BITS,
    Bounds,
    Record,
    differences,
    largest,
    measured_bounds,
)
from lit_cifar.tools.verify.recorder import Order
from lit_cifar.tools.verify.runs import Outcome, workers

_DESCRIPTION = """\
Train a configuration for a few steps in each mode, and compare it step by step with the single-device computation that
the mode equals. Compared are losses, parameters, BatchNorm buffers, optimizer state, sample ids, logged metrics, the
logits of evaluations, checkpoints, and the same run resumed before its last step. Processes that must hold the same
values are compared bit for bit.
Every other argument is passed on to `fit`, e.g. --config FILE, --model.arch=resnet34, --trainer.precision=bf16-mixed.
Without --config it is `tiny`, a narrow ResNet, on synthetic images in float64, where nothing may differ by more than
1e-9. In float32 and bfloat16 the bound is measured by the same run with sums in another order, and steps are replayed
on one device; a mode beyond its bound is judged in float64.

With --module, a training of your own: its first steps are replayed on one device, and compared bit for bit. Every other
argument is then one of LightningCLI, e.g. --trainer.strategy=ddp --trainer.devices=2 --model.width=64."""
_EPILOG = """\
examples:
  python -m lit_cifar verify --modes=ddp,pp,tp
  python -m lit_cifar verify --modes=fsdp2 --devices=4 --config=RUN_FOLDER/config.yaml
  python -m lit_cifar verify --module=my_package.MyModule --data=my_package.MyData --trainer.strategy=ddp

exit status:
  0  at least one mode was compared, and all that were have passed
  1  a mode was compared, and it is wrong
  2  something that was asked for cannot work
  3  no verdict: a run ended by an error of its own, or there was nothing to compare"""

RULES = {"noise_factor": NOISE_FACTOR, "floor_ulp": FLOOR_ULP, "float64": EXACT_BOUND}
NO_VERDICT = 3  # exit status where nothing is known to be wrong, but not all that ran could be compared
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
ROUNDING = (
    "not judged: it is further from one device than measured rounding, but not in float64, so this is rounding or a "
    "mistake of this precision alone; pass --virtual_replicas=2 or more, with which no bit may differ"
)

# Runs of one device in which only the rounding differs: the order of `Trace`, and further flags.
_ROUNDINGS: dict[str, tuple[Order, list[str]]] = {
    "reversed": ("reversed", []),
    "plain kernels": ("plain_kernels", []),
    "float32": ("usual", ["--trainer.precision=32-true"]),
}
# The runs that measure the tolerance, by precision.
_USED = {"32-true": ["reversed", "plain kernels"], "bf16-mixed": ["reversed", "plain kernels", "float32"]}


def main(args: list[str]) -> int:
    """Verify, print, and return the exit status, which docs/verify.md lists."""
    options, rest = verify_parser().parse_known_args(args)
    if options.module is not None and options.launcher:
        raise ConfigError(
            "--module is started as a whole, so --launcher has nothing to start",
            remedy="let the launcher start it: torchrun --nproc-per-node=2 -m lit_cifar verify --module CLASS",
        )
    target = terminal.writable(options.json) if process_rank() == 0 else None  # with --module every rank runs this
    record = terminal.about() | {"rules": RULES}
    terminal.exit_orderly_when_terminated()
    if options.module is not None:
        from lit_cifar.checks.replay.command import replayed  # for a user's own training

        report = replayed(options.module, options.data, steps=options.steps, args=rest)
        status = {"pass": 0, "fail": 1}.get(report["outcome"], NO_VERDICT)
        terminal.write_json(target, record | report | {"exit_status": status})
        return status
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
    parser.add_argument("--module", metavar="CLASS", help="Replay your own LightningModule, e.g. my_package.MyModule.")
    parser.add_argument("--data", metavar="CLASS", help="Its LightningDataModule, if it has one.")
    parser.add_argument("--json", metavar="FILE", help="Write all results, versions and hardware to this file.")
    return parser


def _verified(options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    if options.virtual_replicas is not None:
        rest = [*rest, f"--virtual_replicas={options.virtual_replicas}"]
    names = options.modes.split(",")
    sizes = {"devices": options.devices, "steps": options.steps}
    rows = verify(names, **sizes, args=rest, launcher=options.launcher)
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
    `fit`; by default it is `tiny` on synthetic images, in float64. In float32 and bfloat16 rounding is magnified from
    step to step: a mode beyond the measured bounds fails only if it fails in float64 too, else nothing is known. A mode
    called by its name that cannot run so is a `ConfigError`; "all" leaves it out. `launcher`, the words before `fit`,
    starts the processes of each mode, as many as the mode has.
    """
    if steps < 2:
        raise ConfigError(f"--steps={steps} leaves no step before a resume", remedy="pass --steps 2 or more")

    def rows_of(names: Sequence[str], *more: str) -> list[VerifiedMode]:
        wanted, leave_out = chosen(list(names), devices=devices), "all" in names
        with tempfile.TemporaryDirectory(prefix="lit_cifar-verify-") as folder:
            settings = Configuration.of([*args, *more], devices=devices, folder=Path(folder), launcher=launcher)
            verifier = Verifier(Launcher(settings, steps, Path(folder)))
            return verify_modes(verifier, [*_possible(wanted, settings, leave_out=leave_out)], leave_out=leave_out)

    rows = rows_of(names)
    if doubted := {row.mode: row for row in rows if row.may_be_rounding}:
        say("once more in float64, where rounding is no excuse: " + ", ".join(doubted))
        for again in rows_of([*doubted], f"--trainer.precision={EXACT}"):
            if again.passed:
                doubted[again.mode].outcome = "abstained"
                doubted[again.mode].problems.insert(0, ROUNDING)
    return rows


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
        """Run each case and the references that they need, several at a time; and yield results as they are judged.

        A worker judges what it has run before it runs the next: records are large, and must not pile up on the disk. So
        each reference is forgotten as soon as its last case has been judged.
        """
        settings = self.launcher.settings
        chunks = [self.ghost_batches_of(case.mode) for case in cases]
        waiting = Counter(chunks)
        judging = Lock()  # the precision in which an evaluation is repeated is set for all threads

        def compared(number: int, references: References) -> Compared:
            case = cases[number]
            folder = self.launcher.new_folder(case.mode.name)
            outcome = self.launcher.run_mode(case.mode, folder, title=case.title or case.mode.name, more=case.flags)
            row = VerifiedMode(case.mode.name, settings.in_words(chunks[number]))
            with judging:
                judge(row, outcome, Record(folder), references.get(chunks[number]), settings)
            shutil.rmtree(folder)
            return Compared(number, row, outcome)

        # Modes whose processes import everything anew come first: the last ones have nothing beside them.
        slowest_first = sorted(range(len(cases)), key=lambda number: cases[number].mode.name != "ddp_spawn")
        launched: list[Future[Compared]] = []
        with workers(settings.num_at_once) as pool:
            references = References(self.launcher, pool)
            for key in dict.fromkeys(chunks[number] for number in slowest_first):
                references.start(key)
                numbers = [number for number in slowest_first if chunks[number] == key]
                launched += [pool.submit(compared, number, references) for number in numbers]
            for done in as_completed(launched):
                yield done.result()
                key = chunks[done.result().number]
                waiting[key] -= 1
                if not waiting[key]:
                    references.forget(key)

    def ghost_batches_of(self, mode: SizedMode) -> GhostBatches:
        """The chunks that the mode normalises together; equal for all without BatchNorm, or with virtual replicas."""
        if not self._normalises_batches or self.launcher.settings.num_parts is not None:
            return GhostBatches()
        return mode.ghost_batches(accumulation=self.launcher.settings.accumulation)

    def abstained(self, mode: SizedMode) -> VerifiedMode | None:
        """The row of a mode whose random numbers differ from one device's, so that nothing would be known."""
        settings = self.launcher.settings
        if settings.num_parts is not None or not self._draws_random_numbers:
            return None
        whole = GhostBatches.of(mode.layout(), accumulation=settings.accumulation) == GhostBatches()
        if whole and mode.num_processes == 1:  # a batch passes as on one device, with the same draws
            return None
        return VerifiedMode(mode.name, settings.in_words(self.ghost_batches_of(mode)), problems=[RANDOM])

    @cached_property
    def _normalises_batches(self) -> bool:
        """Whether the output for an image depends on the images that pass the network with it."""
        return normalises_batches(self.launcher.settings.module().network)

    @cached_property
    @torch.no_grad()
    def _draws_random_numbers(self) -> bool:
        """Whether a pass in training advances torch's generator: dropout does, and so does any code that samples."""
        module = self.launcher.settings.module()
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            with suppress(Exception):  # the network may be the user's; `fit` reports its errors
                module.network.train()(torch.zeros(4, *module.image_shape))
            return not torch.equal(before, torch.get_rng_state())


@dataclass(frozen=True)
class References:
    """Single-device runs that are made once and kept until they are forgotten, and how far a mode may be from them."""

    launcher: Launcher
    pool: Executor
    _runs: dict[GhostBatches, Future[Record]] = field(default_factory=dict)
    # Bounds depend on the number of samples that are normalised at once, so they are measured once for equal words: by
    # a reference, and the runs that differ from it by rounding alone.
    _measuring: dict[str, list[Future[Record]]] = field(default_factory=dict)
    _bounds: dict[str, list[Bounds]] = field(default_factory=dict)

    def start(self, chunks: GhostBatches) -> None:
        """Start the run of one device that normalises `chunks` apart, and the runs that measure its tolerance."""
        settings = self.launcher.settings
        words = settings.in_words(chunks)
        self._runs[chunks] = self._started(f"reference: {words}", chunks)
        if words not in self._measuring:
            names = [] if settings.is_exact else _USED[settings.precision]
            others = [self._started(f"tolerance: {words}, {name}", chunks, *_ROUNDINGS[name]) for name in names]
            self._measuring[words] = [self._runs[chunks], *others]

    def _started(
        self, title: str, chunks: GhostBatches, order: Order = "usual", more: Sequence[str] = ()
    ) -> Future[Record]:
        return self.pool.submit(self.launcher.run_alone, title, chunks, order, more)

    def get(self, chunks: GhostBatches) -> Reference:
        """Wait for the reference that normalises `chunks` apart; only one thread may do so at a time."""
        words = self.launcher.settings.in_words(chunks)
        if words not in self._bounds:
            self._bounds[words] = self._measured(*(run.result() for run in self._measuring[words]))
        return Reference(self._runs[chunks].result(), self._bounds[words])

    def _measured(self, expected: Record, *others: Record) -> list[Bounds]:
        if not others:
            same_bits = self.launcher.settings.num_parts is not None
            return [SAME_BITS if same_bits else dict.fromkeys(KINDS, EXACT_BOUND)] * self.launcher.steps
        steps = range(1, self.launcher.steps + 1)
        noise = [[largest(differences(other.step(k), expected.step(k))) for k in steps] for other in others]
        for other in others:
            shutil.rmtree(other.folder)
        dtype = next(iter(expected.step(1)["parameters"].values())).dtype
        return measured_bounds(noise, eps=torch.finfo(dtype).eps)

    def forget(self, chunks: GhostBatches) -> None:
        shutil.rmtree(self._runs.pop(chunks).result().folder)
