"""What a training does with the result of the probe: refuses to start, or says why it failed."""

import warnings
from collections.abc import Sequence

import torch

from lit_cifar.copy_probe.cache import known_clean, remember_clean
from lit_cifar.copy_probe.probe import SHORT_SIZES, faults_of
from lit_cifar.copy_probe.probe_process import ProbeError
from lit_cifar.copy_probe.transport import Transport
from lit_cifar.errors import ConfigError

_REPEATS = 2
_LIMIT_S = 30.0


def refuse_faulty_copies(devices: Sequence[torch.device], *, strategy: str) -> None:
    """Probe the copies between `devices`, unless they have been probed since the machine booted.

    Raises:
        ConfigError: A copy did not arrive.
    """
    if known_clean(devices):
        return
    try:
        fault = next(faults_of(devices, sizes=SHORT_SIZES, repeats=_REPEATS, limit_s=_LIMIT_S), None)
    except ProbeError as error:
        warnings.warn(f"{error}; python -m lit_cifar doctor tries it again", stacklevel=2)
        return
    if fault is None:
        remember_clean(devices)
        return
    raise ConfigError(
        f"--trainer.strategy={strategy} copies tensors between devices, but not all of them arrive:\n{fault}.",
        remedy=f"NCCL_P2P_DISABLE=1 with --trainer.strategy=ddp --trainer.devices={len(devices)} avoids such copies, "
        "--trainer.devices=1\nneeds none. To mend them, turn off the IOMMU (VT-d, AMD-Vi) or PCIe ACS in the BIOS, or "
        "boot Linux with iommu=pt.",
    )


def blame(devices: Sequence[torch.device], *, transport: Transport | None = None) -> tuple[bool, str]:
    """Whether copies between `devices` are to blame for a loss that is not finite, and a sentence that says so."""
    try:
        fault = next(
            faults_of(devices, transport=transport, sizes=SHORT_SIZES, repeats=_REPEATS, limit_s=_LIMIT_S), None
        )
    except ProbeError as error:
        return False, str(error)
    if fault is None:
        return False, "copies between the devices arrive, they were probed again"
    return True, f"copies between the devices do not arrive, and may be the cause: {fault}"
