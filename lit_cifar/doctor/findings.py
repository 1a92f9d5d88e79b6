"""What the doctor reports: a problem in one sentence, the command that mends it, and the modes that it stops."""

from dataclasses import dataclass

from lit_cifar.modes import MODES

ALL_MODES = tuple(mode.name for mode in MODES)
PROCESS_MODES = tuple(mode.name for mode in MODES if mode.has_processes)
COPY_MODES = ("dp", "mp", "ddp_mp")
"""Those in which one process copies tensors from GPU to GPU."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        part: Where it was found: "machine", "environment", "copies", "ranks" (a device) or "transport" (between ranks).
        problem: One sentence.
        mend: What to type or to do.
        modes: Names of the modes that are not fit because of it. Without any it is a note, and no fault.
    """

    part: str
    problem: str
    mend: str
    modes: tuple[str, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Whether the machine is not fit for some mode because of it."""
        return bool(self.modes)


def size_of(num_bytes: int) -> str:
    """A size to read: 4 KiB, 64 MiB."""
    for factor, unit in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:g} {unit}"
    return f"{num_bytes} bytes"
