"""`python -m lit_cifar modes`: the modes that run on a machine, their devices and commands. `doctor` begins here."""

import os
from dataclasses import dataclass

import torch

from lit_cifar.mode.table import MODES, Row
from lit_cifar.reporting.run_report import counted
from lit_cifar.tools.terminal import CommandParser, console, table

# More stages than devices need the name of the class: a short name takes no arguments.
_TWO_STAGES = "--trainer.strategy=LayerParallelStrategy --trainer.strategy.num_stages=2"
_STAGES_ON_ONE_GPU = f"python -m lit_cifar fit {_TWO_STAGES} --trainer.devices=1"


def main(args: list[str]) -> int:
    CommandParser("modes", description="Which modes run on this machine, and how to start them.").parse_args(args)
    num_cores, num_gpus = cores_and_gpus()
    rows = mode_table(num_cores, num_gpus)
    gpus = counted(num_gpus, "GPU") if num_gpus else "no GPU"
    title = f"[bold]Modes on this machine: {counted(num_cores, 'core')}, {gpus}, torch {torch.__version__}"
    found = table(title, ("mode", "what is split", "processes", "runs here"))
    for row in rows:
        found.add_row(row.mode.name, row.mode.splits, row.mode.processes, f"[green]{row.verdict}")
    console().print(found)
    print("N: --trainer.devices; S: stages of the network, 2 by default. To run one:\n")
    print(*(f"  {row.command}" for row in rows), sep="\n")
    return 0


@dataclass(frozen=True)
class ModeRow:
    mode: Row
    verdict: str  # the devices, or the reason why it does not run
    command: str  # the command to run it there


def cores_and_gpus() -> tuple[int, int]:
    return len(os.sched_getaffinity(0)), torch.cuda.device_count()


def mode_table(num_cores: int, num_gpus: int) -> list[ModeRow]:
    """Every mode on a machine: on its GPUs where they suffice, otherwise on the CPU."""
    return [_row(mode, num_cores, num_gpus) for mode in MODES]


def _row(mode: Row, num_cores: int, num_gpus: int) -> ModeRow:
    command = " ".join(["python -m lit_cifar fit", *mode.flags(mode.min_devices)])
    if mode.name == "mp" and num_gpus == 1:
        return ModeRow(mode, "yes, all stages on the one GPU", _STAGES_ON_ONE_GPU)
    if num_gpus >= mode.min_devices:
        on = "1 GPU" if mode.min_devices == 1 else f"{mode.min_devices} GPUs or more"
        return ModeRow(mode, f"yes, on {on}", command)
    if num_gpus:
        verdict = f"on the CPU alone: needs {mode.min_devices} GPUs"
    elif mode.has_processes:
        verdict = f"yes, gloo processes on {counted(num_cores, 'core')}"
    else:
        verdict = "yes, on the CPU" if mode.min_devices == 1 else "yes, on virtual devices of the CPU"
    return ModeRow(mode, verdict, f"{command} --trainer.accelerator=cpu")
