"""Whether copies between GPUs arrive: the findings of `lit_cifar.copy_probe`."""

from collections.abc import Callable, Sequence

import torch

from lit_cifar.copy_probe import CopyFault, ProbeError, Transport, probe
from lit_cifar.copy_probe.probe import SIZES
from lit_cifar.doctor.findings import COPY_MODES, Finding

_MOST_PAIRS = 6  # that are named in a sentence
_MEND = "turn off the IOMMU or PCIe ACS in the BIOS, or boot with iommu=pt   # until then use ddp, see docs/copies.md"


def check_copies(
    devices: Sequence[torch.device],
    *,
    report: Callable[[str], None],
    transport: Transport | None = None,
    sizes: Sequence[int] = SIZES,
) -> tuple[str, list[Finding]]:
    """Copy between every ordered pair of devices. Returns a sentence to print, and what is wrong.

    Args:
        devices: The GPUs.
        report: Called with what comes next.
        transport: What copies; by default torch.
        sizes: In bytes.
    """
    if len(devices) < 2:
        return f"not probed: that needs two GPUs, and torch sees {len(devices) or 'none'}", []
    num_pairs = len(devices) * (len(devices) - 1)
    report(f"copies between {len(devices)} devices")
    try:
        faults = probe(devices, transport=transport, sizes=sizes)
    except ProbeError as error:
        problem = f"{str(error)[0].upper()}{str(error)[1:]}."
        return "not probed", [Finding(part="copies", problem=problem, mend="nvidia-smi", modes=COPY_MODES)]
    if not faults:
        return f"all of {num_pairs} ordered pairs copied every byte, idle and under load", []
    return f"faults in {len(_pairs(faults))} of {num_pairs} ordered pairs", [_finding(faults)]


def _finding(faults: Sequence[CopyFault]) -> Finding:
    pairs = _pairs(faults)
    more = len(pairs) - _MOST_PAIRS
    named = ", ".join(pairs[:_MOST_PAIRS]) + (f" and {more} more" if more > 0 else "")
    problem = f"Copies between devices do not arrive ({named}): {faults[0]}."
    return Finding(part="copies", problem=problem, mend=_MEND, modes=COPY_MODES)


def _pairs(faults: Sequence[CopyFault]) -> list[str]:
    """In the order in which they were found."""
    return [*dict.fromkeys(f"{fault.source} to {fault.destination}" for fault in faults)]
