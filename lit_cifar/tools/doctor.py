"""`python -m lit_cifar doctor`: the modes in which this machine can train, how, and what speaks against one of them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import torch
from rich.console import Console
from rich.markup import escape

from lit_cifar import internals
from lit_cifar.data.workers import num_cores
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


def main(args: list[str]) -> int:
    doctor_parser().parse_args(args)
    terminal.exit_orderly_when_terminated()
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    checks = [check_internals(), check_copies(gpus)]
    print_page(checks, [mode_row(mode, len(gpus)) for mode in MODES], terminal.console())
    return 1 if faults(checks) else 0


def doctor_parser() -> argparse.ArgumentParser:
    return terminal.CommandParser("doctor", description=_DESCRIPTION)


@dataclass(frozen=True)
class ModeRow:
    mode: Row
    verdict: str  # the devices, or the reason why it does not run
    flags: Sequence[str]  # with which `fit` runs it there


def mode_row(mode: Row, num_gpus: int) -> ModeRow:
    """A mode on this machine: on its GPUs where they suffice, otherwise on the CPU."""
    flags = mode.flags(mode.min_devices)
    if mode.name == "mp" and num_gpus == 1:
        return ModeRow(mode, "yes, all stages on the one GPU", placed(sized_modes(2)["mp"], num_gpus=1).flags)
    if num_gpus >= mode.min_devices:
        on = "1 GPU" if mode.min_devices == 1 else f"{mode.min_devices} GPUs or more"
        return ModeRow(mode, f"yes, on {on}", flags)
    if num_gpus:
        verdict = f"on the CPU alone: needs {mode.min_devices} GPUs"
    elif mode.has_processes:
        verdict = f"yes, gloo processes on {counted(num_cores(), 'core')}"
    else:
        verdict = "yes, on the CPU" if mode.min_devices == 1 else "yes, on virtual devices of the CPU"
    return ModeRow(mode, verdict, [*flags, "--trainer.accelerator=cpu"])


@dataclass(frozen=True)
class MachineFinding:
    """A defect of a machine, or a note."""

    problem: str  # one sentence
    mend: str  # the remedy: words to type, or something to do
    modes: tuple[str, ...] = ()  # modes that are not fit because of it; a note has none


@dataclass(frozen=True)
class Check:
    name: str
    seen: str
    findings: Sequence[MachineFinding] = ()


def faults(checks: Sequence[Check]) -> list[MachineFinding]:
    return [finding for check in checks for finding in check.findings if finding.modes]


def check_internals() -> Check:
    """Names inside torch and Lightning that a release may have changed, and the modes that need them."""
    modes = {f"--trainer.strategy={name}": (name,) for name in ALL_MODES} | {internals.RUN: ALL_MODES}
    modes[internals.MODES] = tuple(name for name in ALL_MODES if name not in ("single", "ddp", "ddp_spawn"))
    absent = [(error, modes.get(needs, ())) for needs in internals.NAMES for error in internals.missing(needs)]
    findings = [MachineFinding(f"{error.problem}.", error.remedy, needed_by) for error, needed_by in absent]
    count = len({(place, name) for place, name, _ in internals.each()})
    of = f"names inside torch {torch.__version__} and Lightning {metadata.version('lightning')}"
    seen = f"{len(findings)} of {count} {of} missing" if findings else f"all {count} {of} found"
    return Check("internals", seen, findings)


def check_copies(devices: Sequence[torch.device]) -> Check:
    """Copy between every ordered pair of GPUs, as before `dp`, `mp` and `ddp_mp` train."""
    if len(devices) < 2:
        return Check("copies", f"not tried: that needs two GPUs, and torch sees {len(devices) or 'none'}")
    num_pairs, faults = len(devices) * (len(devices) - 1), copy_faults(devices)
    if not faults:
        return Check("copies", f"all of {num_pairs} ordered pairs of GPUs copied every byte")
    seen = f"faults in {len(faults)} of {num_pairs} ordered pairs of GPUs"
    pairs = ", ".join(f"{source} to {destination}" for source, destination in faults)
    problem = f"Copies between devices do not arrive ({pairs}): {next(iter(faults.values()))}."
    return Check("copies", seen, [MachineFinding(problem, _MEND_COPIES, COPY_MODES)])


def print_page(checks: Sequence[Check], rows: Sequence[ModeRow], out: Console) -> None:
    """Print what was found; `rows` are the modes as they are where nothing is found."""
    found = faults(checks)
    if found:
        out.print(f"\n[bold red]Not fit: {counted(len(found), 'fault')}[/]")
    else:
        out.print(f"\n[bold green]Fit: no fault was found, and {len(rows)} modes run here[/]")
    numbered = [(f"{number}.", fault) for number, fault in enumerate(found, start=1)]
    notes = [("note", finding) for check in checks for finding in check.findings if not finding.modes]
    for label, finding in [*numbered, *notes]:
        out.print(f"[bold]{label:>5}[/] {escape(finding.problem)}")
        out.print(f"      {finding.mend}", markup=False, style="cyan", soft_wrap=True)  # commands stay whole
    modes = terminal.table("[bold]modes", ("mode", "what is split", "processes", "runs here"))
    for row in rows:
        numbers = ", ".join(str(number) for number, fault in enumerate(found, start=1) if row.mode.name in fault.modes)
        verdict = f"[red]no, see {numbers}" if numbers else f"[green]{row.verdict}"
        modes.add_row(row.mode.name, row.mode.splits, row.mode.processes, verdict)
    out.print(modes)
    out.print("N: --trainer.devices; S: stages of the network, 2 by default. To run one:\n")
    for row in rows:
        out.print(f"  {' '.join(['python -m lit_cifar fit', *row.flags])}", markup=False, soft_wrap=True)
    out.print("\n[bold]checks[/]")
    for check in checks:
        out.print(f"  {check.name:<13}{escape(check.seen)}")
