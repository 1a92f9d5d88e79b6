"""`python -m lit_cifar modes`: the modes, and which of them run on this machine."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from lit_cifar.tools.commands.terminal import CommandParser, console
from lit_cifar.tools.doctor.mode_table import LocalMachine, ModeRow, mode_table


def main(args: list[str]) -> int:
    """Print the table for this machine, and the command of every mode that runs.

    Raises:
        ConfigError: There are arguments; only `--help` is known.
        SystemExit: After --help.
    """
    CommandParser("modes", description="Which modes run on this machine, and how to start them.").parse_args(args)
    machine = LocalMachine.here()
    rows = mode_table(machine)
    console().print(_drawn(rows, title=f"Modes on this machine: {machine}"))
    print("N: --trainer.devices; S: stages of the network, 2 by default. To run one:\n")
    print(*(f"  {row.command}" for row in rows if row.command is not None), sep="\n")
    return 0


def _drawn(rows: Sequence[ModeRow], *, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
    for column in ("mode", "what is split", "processes", "runs here"):
        table.add_column(column)
    styles = {"cuda": "green", "cpu": "green", None: "red"}
    for row in rows:
        verdict = f"[{styles[row.accelerator]}]{row.verdict}"
        table.add_row(row.mode.name, row.mode.splits, row.mode.processes, verdict)
    return table
