"""`python -m lit_cifar chaos`: arguments, table and exit status."""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

from rich.table import Table

from lit_cifar.errors import ConfigError
from lit_cifar.tools.chaos.experiment import JobResult, chaos
from lit_cifar.tools.chaos.faults import EQUAL_SIZE, shares
from lit_cifar.tools.chaos.training import chosen_modes
from lit_cifar.tools.commands import terminal

_ENOUGH = next(number for number in count(1) if shares(number)[0] >= len(EQUAL_SIZE))
_DESCRIPTION = f"""\
Train under torchrun without faults, and then again while ranks are killed, terminated and stopped, the newest
checkpoint is truncated, a full disk is simulated and the job is resized, at random moments and during saves. In the end
every sample must have counted as in the uninterrupted run, and parameters and optimizer state must be the same: bitwise
where the job kept its size, within 1e-5, in float64, where it was resized. With --virtual_replicas=V the resized job
goes to one process and to twice as many in another mode, and must end bitwise too. All on the CPU.
Every other argument is passed on to `fit`, e.g. --config FILE. Without --config a small ResNet trains on synthetic
images. The training is as long as its faults need.
{_ENOUGH} faults or more include every kind."""


def main(args: list[str]) -> int:
    """Run, print the table, and return 0 if nothing was lost, else 1."""
    options, rest = chaos_parser().parse_known_args(args)
    if options.faults < 1 or options.seed < 0:
        raise ConfigError(
            f"--faults={options.faults} --seed={options.seed}: faults must be 1 or more, and the seed 0 or more",
            remedy="the defaults are 20 and 0",
        )
    modes = chosen_modes(options.modes.split(","), devices=options.devices, num_parts=options.virtual_replicas)
    target = terminal.writable(options.json)
    record = terminal.about() | {"seed": options.seed, "faults": options.faults, "devices": options.devices}
    record |= {"virtual_replicas": options.virtual_replicas}
    terminal.exit_orderly_when_terminated()
    begin = time.monotonic()
    kept = None if options.output is None else terminal.empty_folder(options.output, option="--output").resolve()
    with tempfile.TemporaryDirectory(prefix="lit_cifar-chaos-") as temporary:
        asked = {"num_faults": options.faults, "seed": options.seed}
        rows = chaos(modes, rest, **asked, folder=kept or Path(temporary), report=terminal.say)
    seconds = time.monotonic() - begin
    passed = all(row.passed for row in rows)
    _print(rows, options)
    found = [asdict(row) | {"passed": row.passed} for row in rows]
    terminal.write_json(target, record | {"rows": found, "passed": passed, "seconds": seconds})
    return 0 if passed else 1


def _print(rows: list[JobResult], options: argparse.Namespace) -> None:
    out = terminal.console()
    out.print(result_table(rows, title=f"{options.faults} faults for each mode, seed {options.seed}"))
    for row in rows:
        for problem in row.problems[:5]:
            out.print(f"{row.mode} on {', '.join(map(str, row.sizes))}: {problem}", markup=False)
    if options.output is None and not all(row.passed for row in rows):
        out.print(f"to keep the logs, run it again with --seed {options.seed} --output FOLDER", markup=False)


def chaos_parser() -> argparse.ArgumentParser:
    parser = terminal.CommandParser("chaos", description=_DESCRIPTION)
    parser.add_argument("--faults", type=int, default=20, metavar="K", help="Faults for each mode (default: 20).")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="Seed of the kinds, moments and ranks of faults (default: 0)."
    )
    parser.add_argument("--modes", default="ddp", metavar="A,B", help="Modes to train in (default: ddp).")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="Devices of each mode (default: 2).")
    parser.add_argument(
        "--virtual_replicas",
        type=int,
        metavar="V",
        help="Train with so many virtual replicas: 4 for 1, 2, 4 processes.",
    )
    parser.add_argument("--json", metavar="FILE", help="Write all faults, results, versions and hardware to this file.")
    parser.add_argument(
        "--output", metavar="FOLDER", help="Keep logs, sample logs and checkpoints there. Without it nothing is kept."
    )
    return parser


# The table ------------------------------------------------------------------------------------------------------------

_NAMES = {"kill": "SIGKILL", "term": "SIGTERM", "stop": "SIGSTOP", "resize": "resized", "truncate": "truncated"}


def result_table(rows: Sequence[JobResult], *, title: str) -> Table:
    found = terminal.table(title)
    found.add_column("mode", no_wrap=True)
    found.add_column("processes", no_wrap=True)
    found.add_column("faults")
    for name in ("restarts", "steps\nrepeated", "ids\nmissing", "ids\ndoubled", "difference", "time"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("", no_wrap=True)
    for row in rows:
        sizes = ", ".join(map(str, row.sizes)) + (f"\n[dim]{row.precision}[/]")
        found.add_row(row.mode, sizes, *_cells([row]), end_section=row is rows[-1])
    found.add_row("total", "", *_cells(rows))
    return found


def _cells(rows: Sequence[JobResult]) -> list[str]:
    events = [event for row in rows for event in row.events]
    kinds, during_saves = Counter(event.fault.kind for event in events), sum(event.during_save for event in events)
    faults = ", ".join(f"{count} {_NAMES.get(kind, 'disk full')}" for kind, count in kinds.items())
    return [
        f"{kinds.total()}: {faults}\n[dim]{during_saves} during a save[/]",
        str(sum(row.restarts for row in rows)),
        str(sum(row.repeated for row in rows)),
        _sum([row.missing for row in rows]),
        _sum([row.doubled for row in rows]),
        _difference(rows[0]) if len(rows) == 1 else "",
        f"{sum(row.seconds for row in rows):.0f} s",
        "[bold green]PASS[/]" if all(row.passed for row in rows) else "[bold red]FAIL[/]",
    ]


def _sum(counts: Sequence[int | None]) -> str:
    """The sum of counts; a dash where one of them is not known."""
    return "-" if None in counts else str(sum(filter(None, counts)))


def _difference(row: JobResult) -> str:
    if row.difference is None:
        return "-"
    shown = f"{row.difference:.1e}" if row.difference else "0"
    bound = f"<= {row.bound:.0e}" if row.bound else "bitwise"
    return f"{shown if row.difference <= row.bound else f'[red]{shown}[/]'}\n[dim]{bound}[/]"
