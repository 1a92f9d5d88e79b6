"""`python -m lit_cifar modes`: the modes, and which of them run on this machine."""

from rich.box import SIMPLE
from rich.table import Table

from lit_cifar.tools.commands.terminal import CommandParser, console
from lit_cifar.tools.doctor.mode_table import LocalMachine, mode_table


def main(args: list[str]) -> int:
    """Print the table for this machine, and the command of every mode."""
    CommandParser("modes", description="Which modes run on this machine, and how to start them.").parse_args(args)
    machine = LocalMachine.here()
    rows = mode_table(machine)
    table = Table(title=f"Modes on this machine: {machine}", title_justify="left", title_style="bold", box=SIMPLE)
    for column in ("mode", "what is split", "processes", "runs here"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.mode.name, row.mode.splits, row.mode.processes, f"[green]{row.verdict}")
    console().print(table)
    print("N: --trainer.devices; S: stages of the network, 2 by default. To run one:\n")
    print(*(f"  {row.command}" for row in rows), sep="\n")
    return 0
