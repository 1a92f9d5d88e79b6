"""`python -m lit_cifar doctor`: the examination of this machine, and its page: faults, then modes, then all else."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from lit_cifar.errors import ConfigError
from lit_cifar.reporting.run_report import counted
from lit_cifar.tools import terminal
from lit_cifar.tools.doctor import Check, MachineFinding, size_of
from lit_cifar.tools.doctor.machine import ask_nvidia_smi, check_copies, look_at_environment, look_at_machine
from lit_cifar.tools.doctor.measurement import OPERATIONS, SIZES, Measurement
from lit_cifar.tools.doctor.modes import ModeRow, cores_and_gpus, judge_modes, mode_table
from lit_cifar.tools.doctor.ranks import Ranks, examine_ranks
from lit_cifar.tools.terminal import say

_DESCRIPTION = """\
Whether this machine is fit to train in parallel, mode by mode. Looked at are devices, memory, links, versions, disk,
ports, network interfaces and what a launcher has left in the environment. Copies between GPUs are probed. Processes
calculate and send each other tensors: whoever is wrong or slow is named.
Exit status: 0 if no fault was found, 1 if one was, 2 for arguments that cannot work."""


def main(args: list[str]) -> int:
    options = doctor_parser().parse_args(args)
    json_file = terminal.writable(options.json)
    terminal.exit_orderly_when_terminated()
    found = examine(options.devices, folder=Path(options.run_dir))
    print_page(found, terminal.console())
    terminal.write_json(json_file, terminal.about() | found.to_json())
    return 1 if found.faults else 0


def doctor_parser() -> argparse.ArgumentParser:
    parser = terminal.CommandParser("doctor", description=_DESCRIPTION)
    processes = "Processes that calculate and send each other tensors (default: one for each GPU, or 2 on the CPU)."
    parser.add_argument("--devices", type=int, metavar="N", help=processes)
    runs = "Where runs will be written (default: runs)."
    parser.add_argument("--run_dir", default="runs", metavar="FOLDER", help=runs)
    parser.add_argument("--json", metavar="FILE", help="Write everything that was found, versions and hardware to it.")
    return parser


@dataclass(kw_only=True)
class Examination:
    """The results of an examination; `findings` are all that is wrong, in the order in which it was found."""

    machine: list[Check]
    environment: list[Check]
    links: str  # output of `nvidia-smi topo -m`; "" with fewer than two GPUs
    copies: Check
    ranks: Ranks
    findings: list[MachineFinding]
    verdicts: list[ModeRow]

    @property
    def faults(self) -> list[MachineFinding]:
        """The findings that make the machine unfit for some mode."""
        return [finding for finding in self.findings if finding.modes]

    def to_json(self) -> dict[str, Any]:
        verdicts = [row.to_json() for row in self.verdicts]
        return {"fit": not self.faults, **asdict(replace(self, verdicts=[])), "verdicts": verdicts}


def examine(num_devices: int | None, *, folder: Path) -> Examination:
    """Examine this machine with `num_devices` processes, of which each needs a GPU; runs are written to `folder`."""
    num_cores, num_gpus = cores_and_gpus()
    num_ranks, accelerator = placed(num_devices, num_gpus=num_gpus)
    say("checking machine and environment")
    machine, environment = look_at_machine(folder=folder), look_at_environment()
    if num_gpus > 1:
        say(f"checking copies between {num_gpus} GPUs")
    copies = check_copies([torch.device("cuda", index) for index in range(num_gpus)])
    where = "GPUs" if accelerator == "cuda" else "the CPU"
    say(f"checking ranks: {num_ranks} on {where} calculate and send each other tensors")
    ranks, wrong = examine_ranks(num_ranks, accelerator)
    findings = [*(finding for check in (*machine, *environment, copies) for finding in check.findings), *wrong]
    return Examination(
        machine=machine,
        environment=environment,
        links=ask_nvidia_smi("topo", "-m") if num_gpus > 1 else "",
        copies=copies,
        ranks=ranks,
        findings=findings,
        verdicts=judge_modes(mode_table(num_cores, num_gpus), findings),
    )


def placed(num_devices: int | None, *, num_gpus: int) -> tuple[int, str]:
    """Number and device of the measuring processes: by default one for each GPU, or 2 on the CPU."""
    if num_devices is None:
        num_devices = num_gpus or 2
    if not 1 <= num_devices <= 1024:
        raise ConfigError(f"--devices={num_devices} is not from 1 to 1024 processes", remedy="pass --devices 2")
    if 0 < num_gpus < num_devices:
        raise ConfigError(
            f"--devices={num_devices}, and torch sees {counted(num_gpus, 'GPU')}: each process needs its own",
            remedy=f"pass --devices {num_gpus}, or hide the GPUs: CUDA_VISIBLE_DEVICES= python -m lit_cifar doctor",
        )
    return num_devices, "cuda" if num_gpus else "cpu"


def print_page(found: Examination, out: Console) -> None:
    if faults := found.faults:
        out.print(f"\n[bold red]Not fit: {counted(len(faults), 'fault')}[/]")
    else:
        out.print(f"\n[bold green]Fit: no fault was found, and {len(found.verdicts)} modes run here[/]")
    notes = [("note", finding) for finding in found.findings if not finding.modes]
    for label, finding in [*((f"{number}.", fault) for number, fault in enumerate(faults, start=1)), *notes]:
        line = Table.grid(Column(width=5, justify="right", style="bold"), Column(), padding=(0, 1))
        line.add_row(label, escape(finding.problem))
        out.print(line)
        out.print(f"      {finding.mend}", markup=False, style="cyan", soft_wrap=True)  # commands stay whole
    out.print(_table("modes", _modes(found)))
    out.print(_table("machine", _seen(found.machine)))
    out.print(_table("environment", _seen(found.environment)))
    if found.links:
        out.print("\n[bold italic]links, by nvidia-smi topo -m[/]")
        out.print(Text.from_ansi(found.links), soft_wrap=True)
    out.print(_table("copies", _seen([found.copies])))
    failed = [] if found.ranks.failure is None else [("failed", escape(found.ranks.failure))]
    out.print(_table("ranks", [*failed, *((f"rank {each.rank}", _rank(each)) for each in found.ranks.measurements)]))
    if len(found.ranks.measurements) > 1:
        out.print(_sweep(found.ranks))


def _table(title: str, rows: Iterable[Sequence[str]], columns: Sequence[Column] = ()) -> Table:
    """A name and a text in each row; or, if there are `columns`, a table with a line of their names."""
    table = Table(
        *(columns or (Column(no_wrap=True), Column())),
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE if columns else None,
        show_header=bool(columns),
        padding=(0, 1 if columns else 2),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _seen(checks: Iterable[Check]) -> list[tuple[str, str]]:
    return [(check.name, escape(check.seen)) for check in checks]


def _modes(found: Examination) -> list[tuple[str, str]]:
    rows = []
    for verdict in found.verdicts:
        name = verdict.mode.name
        numbers = [str(number) for number, fault in enumerate(found.faults, start=1) if name in fault.modes]
        rows.append((name, f"[red]no, see {', '.join(numbers)}" if numbers else f"[green]{verdict.verdict}"))
    return rows


def _rank(found: Measurement) -> str:
    times = ", ".join(f"{name} {1e3 * median(found.seconds[name]):.2f} ms" for name in OPERATIONS)
    return f"{found.device}: {times}, results {'[red]wrong' if any(found.wrong.values()) else '[green]right'}"


def _sweep(ranks: Ranks) -> Table:
    """The median time of all-reduces of each size, and the GB/s that each rank has sent, and received, in a ring."""
    count = len(ranks.measurements)
    # The time of a call is that of the rank that came last: it has not waited for others.
    calls = {size: zip(*(each.sweep[size] for each in ranks.measurements), strict=True) for size in SIZES}
    seconds = {size: median(map(min, of_size)) for size, of_size in calls.items()}
    rows = [
        ("time", *(f"{1e3 * each:.3g} ms" for each in seconds.values())),
        ("GB/s", *(f"{2 * (count - 1) / count * size / 1e9 / each:.2g}" for size, each in seconds.items())),
    ]
    columns = [Column("size"), *(Column(size_of(size), justify="right") for size in SIZES)]
    return _table(f"all-reduce over {count} ranks, {'NCCL' if ranks.accelerator == 'cuda' else 'gloo'}", rows, columns)
