"""The whole examination of this machine, part by part."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lit_cifar.errors import ConfigError
from lit_cifar.reporting.run_report import counted
from lit_cifar.tools.doctor import Check, Finding
from lit_cifar.tools.doctor.machine import ask_nvidia_smi, check_copies, look_at_environment, look_at_machine
from lit_cifar.tools.doctor.mode_table import LocalMachine, ModeRow, judge_modes, mode_table
from lit_cifar.tools.doctor.ranks import Ranks, examine_ranks


@dataclass(kw_only=True)
class Examination:
    """What was looked at; `findings` are everything that is wrong, in the order in which it was found."""

    machine: list[Check]
    environment: list[Check]
    links: str  # between the GPUs, as `nvidia-smi topo -m` prints them; "" with fewer than two
    copies: Check
    ranks: Ranks
    findings: list[Finding]
    verdicts: list[ModeRow]

    @property
    def faults(self) -> list[Finding]:
        """The findings for which the machine is not fit for some mode."""
        return [finding for finding in self.findings if finding.modes]

    def to_json(self) -> dict[str, Any]:
        verdicts = [row.to_json() for row in self.verdicts]
        return {"fit": not self.faults, **asdict(replace(self, verdicts=[])), "verdicts": verdicts}


def examine(num_devices: int | None, *, folder: Path, report: Callable[[str], None]) -> Examination:
    """Examine this machine with so many processes; runs are written to `folder`, and `report` is told what comes next.

    Raises:
        ConfigError: More processes than GPUs, or none.
    """
    here = LocalMachine.here()
    num_ranks, accelerator = placed(num_devices, num_gpus=here.num_gpus)
    report("machine and environment")
    machine, environment = look_at_machine(folder=folder), look_at_environment()
    if here.num_gpus > 1:
        report(f"copies between {here.num_gpus} GPUs")
    copies = check_copies([torch.device("cuda", index) for index in range(here.num_gpus)])
    where = "GPUs" if accelerator == "cuda" else "the CPU"
    report(f"ranks: {num_ranks} on {where} calculate and send each other tensors")
    ranks, wrong = examine_ranks(num_ranks, accelerator)
    findings = [*(finding for check in (*machine, *environment, copies) for finding in check.findings), *wrong]
    return Examination(
        machine=machine,
        environment=environment,
        links=ask_nvidia_smi("topo", "-m") if here.num_gpus > 1 else "",
        copies=copies,
        ranks=ranks,
        findings=findings,
        verdicts=judge_modes(mode_table(here), findings),
    )


def placed(num_devices: int | None, *, num_gpus: int) -> tuple[int, str]:
    """How many processes measure, by default one for each GPU or 2 on the CPU, and on what."""
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
