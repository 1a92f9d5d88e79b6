"""`python -m lit_cifar verify`: from its arguments to the row of each mode, the printed table and the exit status."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

import torch
from rich.table import Column, Table

from lit_cifar.checks.verdict import Outcome, at_most, exit_status
from lit_cifar.errors import ConfigError, printable
from lit_cifar.launch.signals import EXIT_REFUSED
from lit_cifar.reporting.output import without_banners
from lit_cifar.tools import terminal
from lit_cifar.tools.modes import SizedMode, chosen, placed
from lit_cifar.tools.terminal import CommandParser, say
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.judge import VerifiedMode
from lit_cifar.tools.verify.record import KINDS, LOGITS
from lit_cifar.tools.verify.runs import refusal
from lit_cifar.tools.verify.verifier import Case, Verifier

_DESCRIPTION = """\
Train a configuration for a few steps in each mode, and compare it step by step with the single-device computation that
the mode equals. Compared are losses, parameters, BatchNorm buffers, optimizer state, sample ids, logged metrics, the
logits of evaluations, checkpoints, and the same run resumed before its last step. Processes that must hold the same
values are compared bit for bit.
Every other argument is passed on to `fit`, e.g. --config FILE or --model.arch=resnet34.
Without --config it is `tiny`, a narrow ResNet, on synthetic images. All runs are in float64, where nothing may differ
by more than 1e-9, and no logits by more than 1e-7. Or bit for bit, in any precision, with --virtual_replicas=V: a batch
has V parts in every mode."""
_EPILOG = """\
examples:
  python -m lit_cifar verify --modes=ddp,pp,tp
  python -m lit_cifar verify --modes=fsdp2 --devices=4 --config=RUN_FOLDER/config.yaml --data.batch_size=64

exit status:
  0  at least one mode was compared, and all that were have passed
  1  a mode was compared, and it is wrong
  2  something that was asked for cannot work
  3  no verdict: a run ended by an error of its own, or there was nothing to compare"""

_COLUMNS = (*KINDS, LOGITS)
_COLOURS: dict[Outcome, str] = {"pass": "green", "fail": "red", "abstain": "yellow", "crash": "red"}


def main(args: list[str]) -> int:
    """Verify, print, and return the exit status, which `--help` lists."""
    parser = verify_parser()
    options, rest = parser.parse_known_args(args)
    for flag in (word.partition("=")[0] for word in rest):
        if meant := get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.86):
            parser.error(f"there is no {flag}; did you mean {meant[0]}?")
    target = terminal.writable(options.json)
    record = terminal.about()
    terminal.exit_orderly_when_terminated()
    torch.set_num_threads(1)  # the other cores are for the runs
    sizes = {"devices": options.devices, "steps": options.steps}
    rows = verify(options.modes.split(","), **sizes, args=rest)
    out = terminal.console()
    out.print(verdict_table(rows, title=f"{options.steps} steps, compared one by one"))
    for row in rows:
        for line in at_most(5, row.problems, more="{} more findings: see --json FILE"):
            out.print(f"{row.mode}: {printable(line, lines=True)}", markup=False)
    status = exit_status(row.outcome for row in rows)
    found = {"rows": [*map(asdict, rows)], "passed": not status, "exit_status": status}
    terminal.write_json(target, record | sizes | found)
    return status


def verify_parser() -> CommandParser:
    parser = CommandParser("verify", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--modes", default="all", metavar="A,B", help="Modes to verify (default: all).")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="Devices of each mode (default: 2).")
    parser.add_argument("--steps", type=int, default=4, metavar="K", help="Optimizer steps of each run (default: 4).")
    parser.add_argument("--json", metavar="FILE", help="Write all results, versions and hardware to this file.")
    return parser


def verdict_table(rows: Sequence[VerifiedMode], *, title: str) -> Table:
    """A row for each mode, with its bound below each of the largest differences. It fits 120 columns."""
    columns = (Column("mode", no_wrap=True), Column("proc.", justify="right"), Column("equals", max_width=33))
    table = terminal.table(title, columns, numbers=(*_COLUMNS, "time"))
    table.add_column("", no_wrap=True)
    for row in rows:
        cells = [_cell(row, kind) for kind in _COLUMNS]
        verdict = f"[bold {_COLOURS[row.outcome]}]{row.outcome.upper()}[/]"
        table.add_row(row.mode, str(row.processes or "-"), row.equals, *cells, f"{row.seconds:.0f} s", verdict)
    return table


def _cell(row: VerifiedMode, kind: str) -> str:
    if kind not in row.differences:
        return "-"
    value, bound = row.differences[kind], row.tolerance[kind]
    shown = f"{value:.1e}" if value else "0"
    return f"{shown if value <= bound else f'[red]{shown}[/]'}\n[dim]<= {f'{bound:.1e}' if bound else '0'}[/]"


def verify(names: Sequence[str], *, devices: int = 2, steps: int = 4, args: Sequence[str] = ()) -> list[VerifiedMode]:
    """Compare modes, "all" for every one, with one device: a row for each.

    A mode has so many `devices`: GPUs, or on the CPU processes or virtual devices of one process. `args` are flags of
    `fit`; by default it is `tiny` on synthetic images. A named mode that cannot run so is a `ConfigError`.
    """
    if steps < 2:
        raise ConfigError(f"--steps={steps} leaves no step before a resume", remedy="pass --steps 2 or more")
    wanted = chosen(list(names), devices=devices)
    lone = [mode.name for mode in wanted if mode.name in ("ddp_mp", "ddp_pp") and mode.sizes["num_stages"] == devices]
    if lone:
        say(f"{' and '.join(lone)}: one replica on {devices} devices, so no averages are compared; --devices=4 has two")
    # Modes are sized by Trainers of the CPU, of which Lightning warns where there is a GPU.
    with without_banners(), tempfile.TemporaryDirectory(prefix="lit_cifar-verify-") as folder:
        settings = Configuration.from_flags(args, devices=devices, folder=Path(folder))
        if settings.num_parts is None and settings.draws_random_numbers():
            problem = "the network draws random numbers, as dropout does: others in parts of a batch than on one device"
            raise ConfigError(problem, remedy="pass --virtual_replicas=2 or more, with which all modes draw the same")
        verifier = Verifier(settings, steps, Path(folder))
        return verify_modes(verifier, _placed_here(wanted, settings), leave_out="all" in names)


def _placed_here(wanted: Sequence[SizedMode], settings: Configuration) -> list[SizedMode]:
    """The modes with their parts, if there are virtual replicas, and with these on one GPU, if there are too few."""
    modes = wanted if settings.num_parts is None else [mode.with_parts() for mode in wanted]
    here = [placed(mode, num_gpus=settings.num_gpus) for mode in modes]
    for name in (on.name for on, mode in zip(here, modes, strict=True) if on != mode):
        say(f"on one GPU: {name}")
    return here


def verify_modes(verifier: Verifier, wanted: Sequence[SizedMode], *, leave_out: bool = False) -> list[VerifiedMode]:
    """Rows in the order of `wanted`. Flags that a run refuses are a `ConfigError`, no failed proof.

    To `leave_out` is to print why a mode is refused, unless all are.
    """
    compared = verifier.compare([Case(mode) for mode in wanted])
    refused = {row.mode: refusal(ended) for row, ended in compared if ended.status == EXIT_REFUSED}
    for mode, error in refused.items():
        if not leave_out or len(refused) == len(wanted):
            raise error
        say(f"left out {mode}: {error.problem}")
    return [row for row, _ in compared if row.mode not in refused]
