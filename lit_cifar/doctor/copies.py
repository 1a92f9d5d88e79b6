"""Whether copies between GPUs arrive."""

from collections.abc import Callable, Sequence

import torch

from lit_cifar.doctor.findings import COPY_MODES, Finding
from lit_cifar.strategies.device_copies import CopyFault, copy_faults

_MOST_PAIRS = 6  # that are named in a sentence
_MEND = "turn off the IOMMU or PCIe ACS in the BIOS, or boot with iommu=pt   # until then use ddp, see docs/doctor.md"


def check_copies(
    devices: Sequence[torch.device],
    *,
    report: Callable[[str], None],
    find: Callable[[Sequence[torch.device]], list[CopyFault]] = copy_faults,
) -> tuple[str, list[Finding]]:
    """Copy between every ordered pair of GPUs. Returns a sentence to print, and what is wrong."""
    if len(devices) < 2:
        return f"not tried: that needs two GPUs, and torch sees {len(devices) or 'none'}", []
    num_pairs = len(devices) * (len(devices) - 1)
    report(f"copies between {len(devices)} devices")
    try:
        faults = find(devices)
    except RuntimeError as error:
        problem = f"Copies between devices could not be tried: {str(error).splitlines()[0]}."
        return "not tried", [Finding(part="copies", problem=problem, mend="nvidia-smi", modes=COPY_MODES)]
    if not faults:
        return f"all of {num_pairs} ordered pairs copied every byte", []
    pairs = [f"{fault.source} to {fault.destination}" for fault in faults]
    more = len(pairs) - _MOST_PAIRS
    named = ", ".join(pairs[:_MOST_PAIRS]) + (f" and {more} more" if more > 0 else "")
    problem = f"Copies between devices do not arrive ({named}): {faults[0]}."
    found = Finding(part="copies", problem=problem, mend=_MEND, modes=COPY_MODES)
    return f"faults in {len(pairs)} of {num_pairs} ordered pairs", [found]
