"""`python -m lit_cifar doctor`: the modes in which this machine can train, how, and what speaks against one of them."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from lit_cifar import internals
from lit_cifar.mode.table import MODES, Row
from lit_cifar.reporting.run_report import counted
from lit_cifar.strategies.device_copies import copy_faults
from lit_cifar.tools import terminal
from lit_cifar.tools.modes import placed, sized_modes

ALL_MODES = tuple(mode.name for mode in MODES)
COPY_MODES = ("dp", "mp", "ddp_mp")  # in which one process copies tensors from GPU to GPU
_MEND_COPIES = "turn off the IOMMU or PCIe ACS in the BIOS, or boot with iommu=pt; or use ddp: docs/troubleshooting.md"
_DESCRIPTION = """\
Which modes run on this machine, and how to start them. Whether it is fit to: whether copies between its GPUs arrive,
and torch and Lightning have the private names that a mode needs. `torch.utils.collect_env` describes the machine.
Exit status: 0 if no fault was found, 1 if one was, 2 for arguments that cannot work."""


class Fault(NamedTuple):
    problem: str  # one sentence
    mend: str  # the remedy: words to type, or something to do
    modes: Collection[str]  # modes that are not fit because of it


def main(args: list[str]) -> int:
    doctor_parser().parse_args(args)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    faults = [*missing_names(), *lost_copies(gpus)]
    print_page(faults, terminal.console(), num_gpus=len(gpus))
    return 1 if faults else 0


def doctor_parser() -> terminal.CommandParser:
    return terminal.CommandParser("doctor", description=_DESCRIPTION)


def mode_here(mode: Row, num_gpus: int) -> tuple[str, list[str]]:
    """Where a mode runs on this machine, on its GPUs if they suffice, otherwise on the CPU; and its flags for that."""
    flags = mode.flags(mode.min_devices)
    if mode.name == "mp" and num_gpus == 1:
        return "yes, all stages on the one GPU", placed(sized_modes(2)["mp"], num_gpus=1).flags
    if num_gpus >= mode.min_devices:
        return f"yes, on {'1 GPU' if mode.min_devices == 1 else f'{mode.min_devices} GPUs or more'}", flags
    verdict = f"on the CPU alone: needs {mode.min_devices} GPUs" if num_gpus else "yes, on the CPU"
    return verdict, [*flags, "--trainer.accelerator=cpu"]


def missing_names() -> Iterator[Fault]:
    """Names inside torch and Lightning that a release may have changed, and the modes that need them."""
    modes = {f"--trainer.strategy={name}": (name,) for name in ALL_MODES} | {internals.RUN: ALL_MODES}
    modes[internals.MODES] = tuple(name for name in ALL_MODES if name not in ("single", "ddp", "ddp_spawn"))
    for needs in internals.NAMES:
        for error in internals.missing(needs):
            yield Fault(f"{error.problem}.", error.remedy, modes.get(needs, ()))


def lost_copies(gpus: Sequence[torch.device]) -> Iterator[Fault]:
    """What does not arrive between pairs of GPUs, as before `dp`, `mp` and `ddp_mp` train."""
    if faults := copy_faults(gpus):
        pairs = ", ".join(f"{source} to {destination}" for source, destination in faults)
        problem = f"Copies between devices do not arrive ({pairs}): {next(iter(faults.values()))}."
        yield Fault(problem, _MEND_COPIES, COPY_MODES)


def print_page(faults: Sequence[Fault], out: Console, *, num_gpus: int) -> None:
    if faults:
        out.print(f"\n[bold red]Not fit: {counted(len(faults), 'fault')}[/]")
    else:
        out.print(f"\n[bold green]Fit: no fault was found, and {len(MODES)} modes run here[/]")
    for number, fault in enumerate(faults, start=1):
        out.print(f"[bold]{number:>4}.[/] {escape(fault.problem)}")
        out.print(f"      {fault.mend}", markup=False, style="cyan", soft_wrap=True)  # commands stay whole
    table = terminal.table("[bold]modes", ("mode", "what is split", "processes", "runs here"))
    here = {mode: mode_here(mode, num_gpus) for mode in MODES}
    for mode, (verdict, _) in here.items():
        numbers = ", ".join(str(number) for number, fault in enumerate(faults, start=1) if mode.name in fault.modes)
        shown = f"[red]no, see {numbers}" if numbers else f"[green]{verdict}"
        table.add_row(mode.name, mode.splits, mode.processes, shown)
    out.print(table)
    out.print("N: --trainer.devices; S: stages of the network, 2 by default. To run one:\n")
    for _, flags in here.values():
        out.print(f"  {' '.join(['python -m lit_cifar fit', *flags])}", markup=False, soft_wrap=True)
