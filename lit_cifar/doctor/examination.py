"""The whole examination of this machine, part by part."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lit_cifar.doctor.arithmetic import Accelerator
from lit_cifar.doctor.copies import check_copies
from lit_cifar.doctor.findings import Finding
from lit_cifar.doctor.launch_environment import Clock, look_at_environment
from lit_cifar.doctor.links import Link, find_links
from lit_cifar.doctor.machine import Facts, find_gpus, look_at_machine
from lit_cifar.doctor.mode_table import LocalMachine, mode_table
from lit_cifar.doctor.rank_judge import judge_ranks, slow_ranks
from lit_cifar.doctor.ranks import Ranks, probe_ranks
from lit_cifar.doctor.verdicts import ModeVerdict, judge_modes, missing_from_torch
from lit_cifar.errors import ConfigError

Report = Callable[[str], None]
_NUM_CONFIRMATIONS = 2  # of a rank that seems slow
_WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1"}


@dataclass(kw_only=True)
class Examination:
    """What was looked at and found.

    Attributes:
        machine: Facts to print.
        environment: Likewise.
        links: Between GPUs.
        copies: Whether copies between GPUs arrive, in a sentence.
        ranks: What the processes have measured.
        findings: Everything that is wrong, in the order in which it was found.
        verdicts: Mode by mode.
    """

    machine: Facts
    environment: Facts
    links: list[Link]
    copies: str
    ranks: Ranks
    findings: list[Finding] = field(default_factory=list)
    verdicts: list[ModeVerdict] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        """The findings for which the machine is not fit for some mode."""
        return [finding for finding in self.findings if finding.is_fault]

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return {"fit": not self.faults} | asdict(self)


def examine(num_devices: int | None, *, folder: Path, report: Report) -> Examination:
    """Examine this machine.

    Args:
        num_devices: How many processes measure; by default one for each GPU, or 2 without GPUs.
        folder: Where runs are written.
        report: Called with what comes next.

    Raises:
        ConfigError: More processes than GPUs, or none.
    """
    clock = Clock()
    gpus, machine = find_gpus(), LocalMachine.here()
    num_ranks, accelerator = placed(num_devices, num_gpus=len(gpus), has_nccl="nccl" in machine.backends)
    report("machine and environment")
    facts, findings = look_at_machine(gpus, folder=folder)
    around, more = look_at_environment()
    copies, lost = check_copies([torch.device("cuda", index) for index in range(len(gpus))], report=report)
    where = "GPUs" if accelerator == "cuda" else "the CPU"
    report(f"ranks: {num_ranks} on {where} calculate and send each other tensors")
    ranks, wrong = examine_ranks(num_ranks, accelerator)
    rows = mode_table(machine)
    findings = [*findings, *missing_from_torch(rows), *more, *lost, *wrong, *clock.check()]
    return Examination(
        machine=facts,
        environment=around,
        links=[] if any(gpu.error for gpu in gpus) else find_links(),
        copies=copies,
        ranks=ranks,
        findings=findings,
        verdicts=judge_modes(rows, findings),
    )


def placed(num_devices: int | None, *, num_gpus: int, has_nccl: bool) -> tuple[int, Accelerator]:
    """How many processes measure, and on what.

    Args:
        num_devices: What the user has asked for.
        num_gpus: That torch sees.
        has_nccl: Whether torch can connect them.
    """
    on_gpus = num_gpus > 0 and has_nccl
    if num_devices is None:
        return (num_gpus, "cuda") if on_gpus else (2, "cpu")
    if num_devices < 1:
        raise ConfigError(f"--devices={num_devices} leaves nothing to measure", remedy="pass --devices 2 or more")
    if num_devices > 1024:
        raise ConfigError(f"--devices={num_devices} processes do not fit one machine", remedy="pass --devices 2")
    if on_gpus and num_devices > num_gpus:
        raise ConfigError(
            f"--devices={num_devices}, and torch sees {num_gpus} GPU{'s' * (num_gpus > 1)}: each process needs its own",
            remedy=f"pass --devices {num_gpus}, or hide the GPUs: CUDA_VISIBLE_DEVICES= python -m lit_cifar doctor",
        )
    return num_devices, "cuda" if on_gpus else "cpu"


def examine_ranks(
    num_ranks: int, accelerator: Accelerator, *, probe: Callable[..., Ranks] | None = None
) -> tuple[Ranks, list[Finding]]:
    """Let the processes measure; again, if a rank seems slow, or if NCCL loses something.

    Args:
        num_ranks: Number of processes.
        accelerator: On what.
        probe: What lets them measure.
    """
    probe = probe or probe_ranks
    ranks = probe(num_ranks, accelerator)
    findings = judge_ranks(ranks)
    slow = slow_ranks(ranks)
    for _ in range(_NUM_CONFIRMATIONS if slow else 0):
        again = slow_ranks(probe(num_ranks, accelerator))
        slow = {rank: finding for rank, finding in slow.items() if rank in again}
    if accelerator == "cuda" and ranks.is_transport_faulty:
        findings = _with_remedy(findings, probe(num_ranks, accelerator, settings=_WITHOUT_PEERS))
    return ranks, [*findings, *slow.values()]


def _with_remedy(findings: list[Finding], without_peers: Ranks) -> list[Finding]:
    """The findings; if all is well without copies from GPU to GPU, with the variable that turns them off."""
    if without_peers.is_transport_faulty:
        return findings
    mend = "export NCCL_P2P_DISABLE=1   # with it everything arrived"
    return [replace(finding, mend=mend) if finding.part == "transport" else finding for finding in findings]
