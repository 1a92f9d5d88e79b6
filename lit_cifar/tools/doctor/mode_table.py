"""Which modes run on a machine, on what, and how to start them: what `modes` prints, and where `doctor` begins."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lit_cifar.strategies.modes import MODES, Mode
from lit_cifar.tools.doctor import Finding, counted

# More stages than devices take the form with the class: a short name takes no arguments.
_STAGES_ON_ONE_GPU = (
    "python -m lit_cifar fit --trainer.strategy=LayerParallelStrategy --trainer.strategy.num_stages=2 "
    "--trainer.devices=1"
)


@dataclass(frozen=True, kw_only=True)
class LocalMachine:
    """What decides which modes run."""

    num_cores: int  # that this process may use
    num_gpus: int  # CUDA devices
    backends: frozenset[str]  # of process groups: "gloo", "nccl"

    @classmethod
    def here(cls) -> "LocalMachine":
        found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        return cls(
            num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            num_gpus=torch.cuda.device_count(),
            backends=frozenset(name for name, has in found.items() if has),
        )

    def __str__(self) -> str:
        gpus = counted(self.num_gpus, "GPU") if self.num_gpus else "no GPU"
        return f"{counted(self.num_cores, 'core')}, {gpus}, torch {torch.__version__}"


@dataclass(frozen=True)
class ModeRow:
    """A mode on a machine."""

    mode: Mode
    accelerator: str | None  # where it runs: "cuda", "cpu", or None if it does not or should not
    verdict: str  # in words: with what, or why not
    command: str | None  # what to type to run it there, or what mends the machine; None if torch lacks what it needs

    def to_json(self) -> dict[str, str | bool]:
        """For a file."""
        fit = self.accelerator is not None
        return {"mode": self.mode.name, "fit": fit, "reason": self.verdict, "command": self.command or ""}


def mode_table(machine: LocalMachine) -> list[ModeRow]:
    """Every mode on `machine`: on its GPUs where they suffice, else on the CPU."""
    return [_row(mode, machine) for mode in MODES]


def _row(mode: Mode, machine: LocalMachine) -> ModeRow:
    command = " ".join(["python -m lit_cifar fit", *mode.flags(mode.min_devices)])
    if mode.name == "mp" and machine.num_gpus == 1:
        return ModeRow(mode, "cuda", "yes, all stages on the one GPU", _STAGES_ON_ONE_GPU)
    obstacle = _obstacle_to_gpus(mode, machine)
    if obstacle is None:
        return ModeRow(mode, "cuda", f"yes, on {_in_words(mode.counts(machine.num_gpus))}", command)
    if mode.has_processes and "gloo" not in machine.backends:
        reason = f"{obstacle}; the CPU needs gloo" if machine.num_gpus else "this torch has no gloo"
        return ModeRow(mode, None, f"no: {reason}", None)
    if machine.num_gpus:
        verdict = f"on the CPU alone: {obstacle}"
    elif mode.has_processes:
        verdict = f"yes, gloo processes on {counted(machine.num_cores, 'core')}"
    else:
        verdict = "yes, on the CPU" if mode.min_devices == 1 else "yes, on virtual devices of the CPU"
    return ModeRow(mode, "cpu", verdict, f"{command} --trainer.accelerator=cpu")


def _obstacle_to_gpus(mode: Mode, machine: LocalMachine) -> str | None:
    """Why `mode` cannot run on the machine's GPUs; None if it can."""
    if machine.num_gpus < mode.min_devices:
        return f"needs {mode.min_devices} GPUs"
    return "this torch has no NCCL" if mode.has_processes and "nccl" not in machine.backends else None


def _in_words(counts: Sequence[int]) -> str:
    """E.g. "2 to 5 GPUs", or "2, 4 or 8 GPUs" where some between are missing."""
    *others, last = counts
    words = counted(last, "GPU")
    if not others:
        return words
    if len(counts) == last - counts[0] + 1:
        return f"{counts[0]} to {words}"
    return f"{', '.join(map(str, others))} or {words}"


def missing_from_torch(rows: Sequence[ModeRow]) -> list[Finding]:
    """One finding for each reason for which modes do not run at all."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.accelerator is None:
            reasons.setdefault(row.verdict.removeprefix("no: "), []).append(row.mode.name)
    mend = "pip install --upgrade torch torchvision"
    return [
        Finding(f"{', '.join(names)} cannot run here: {reason}.", mend, tuple(names))
        for reason, names in reasons.items()
    ]


def judge_modes(rows: Sequence[ModeRow], findings: Sequence[Finding]) -> list[ModeRow]:
    """The rows of `mode_table`; for a mode that is not fit, with the first of all findings that says why."""
    against = {mode: finding for finding in reversed(findings) for mode in finding.modes}
    return [
        replace(row, accelerator=None, verdict=found.problem, command=found.mend)
        if (found := against.get(row.mode.name))
        else row
        for row in rows
    ]
