"""Test of copies between the devices of one process: some machines lose them without an error.

Under an IOMMU or with PCIe Access Control Services, copies between GPUs over PCIe can be lost: CUDA does not support
peer-to-peer copies there (CUDA C++ programming guide, "IOMMU on Linux"; pytorch/pytorch#84803).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_cifar.errors import ConfigError

SIZES = (2**12, 2**20, 2**24)  # bytes of a copy
_SENTINEL = 0x5A5AA5A55A5AA5A5  # value of each word of a destination before a copy
_WORD_BYTES = 8

Copy = Callable[[Tensor, Tensor], object]


def copy_faults(
    devices: Sequence[torch.device], *, copy: Copy = lambda source, out: out.copy_(source, non_blocking=True)
) -> dict[tuple[str, str], str]:
    """The ordered pairs of `devices`, as ("cuda:0", "cuda:1"), between which a copy did not arrive, and what was wrong.

    All pairs copy at once. `copy` fills its second tensor, int64 (n,), with the first.
    """
    names = [str(device) if device.type == "cuda" else f"{device.type}:{i}" for i, device in enumerate(devices)]
    pairs = [(a, b) for a in range(len(devices)) for b in range(len(devices)) if a != b]
    faults: dict[tuple[str, str], str] = {}
    for number, num_bytes in enumerate(SIZES * 2):  # a new pattern each time, so that an old one is wrong
        sent = [_pattern(num_bytes // _WORD_BYTES, number * len(devices) + i, on) for i, on in enumerate(devices)]
        outs = {pair: torch.full_like(sent[pair[1]], _SENTINEL) for pair in pairs}
        for (source, _), out in outs.items():
            copy(sent[source], out)
        for (source, destination), out in outs.items():
            right = _pattern(len(out), number * len(devices) + source, devices[destination])
            wrong = out != right  # only the receiver's stream waits for the copy, not the host, as in training
            if num_wrong := int(wrong.sum()):
                kept = ", the destination kept its old content" * bool((out[wrong] == _SENTINEL).all())
                pair = names[source], names[destination]
                lost = f"{num_wrong * _WORD_BYTES:,} did not arrive{kept}"
                faults.setdefault(pair, f"of a copy of {num_bytes:,} bytes from {pair[0]} to {pair[1]} {lost}")
    return faults


def _pattern(num_words: int, number: int, device: torch.device) -> Tensor:
    """Words of a copy, int64, (num_words,). Every device makes the same; no two numbers have a word in common."""
    words = torch.arange(num_words, device=device) + (number << 32)
    return words * 0x5851F42D4C957F2D  # odd, so that no two words become one


def refuse_faulty_copies(devices: Sequence[torch.device], *, strategy: str) -> None:
    if faults := [*copy_faults(devices).values()]:
        problem = f"--trainer.strategy={strategy} copies tensors between devices, but not all arrive:\n{faults[0]}"
        ddp = f"--trainer.strategy=ddp --trainer.devices={len(devices)}"
        mend = "to mend them, turn off the IOMMU (VT-d, AMD-Vi) or PCIe ACS in the BIOS, or boot Linux with iommu=pt"
        raise ConfigError(problem, remedy=f"pass --trainer.devices=1, or {ddp} with NCCL_P2P_DISABLE=1;\n{mend}")
