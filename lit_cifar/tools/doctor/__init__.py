"""Whether a machine is fit to train in parallel: what `python -m lit_cifar doctor` looks at and how it judges."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_cifar.mode.table import MODES

ALL_MODES = tuple(mode.name for mode in MODES)
PROCESS_MODES = tuple(mode.name for mode in MODES if mode.has_processes)
COPY_MODES = ("dp", "mp", "ddp_mp")
"""Those in which one process copies tensors from GPU to GPU."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    problem: str  # one sentence
    mend: str  # what to type or to do
    modes: tuple[str, ...] = ()  # that are not fit because of it; without any it is a note, and no fault


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, as it is printed, and what is wrong with it."""

    name: str
    seen: str
    findings: Sequence[Finding] = ()


def size_of(num_bytes: float) -> str:
    """A size to read: 4 KiB, 64 MiB, 17.3 GiB."""
    power = 3 if num_bytes >= 2**30 else 2 if num_bytes >= 2**20 else 1
    return f"{num_bytes / 1024**power:.1f}".removesuffix(".0") + f" {'KMG'[power - 1]}iB"
