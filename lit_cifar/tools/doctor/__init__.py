"""Checks whether a machine is fit to train in parallel: `python -m lit_cifar doctor`."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_cifar.mode.table import MODES

ALL_MODES = tuple(mode.name for mode in MODES)
PROCESS_MODES = tuple(mode.name for mode in MODES if mode.has_processes)
COPY_MODES = ("dp", "mp", "ddp_mp")
"""The modes in which one process copies tensors from GPU to GPU."""


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


def size_of(num_bytes: float) -> str:
    """A size to read: 4 KiB, 64 MiB, 17.3 GiB."""
    power = 3 if num_bytes >= 2**30 else 2 if num_bytes >= 2**20 else 1
    return f"{num_bytes / 1024**power:.1f}".removesuffix(".0") + f" {'KMG'[power - 1]}iB"
