"""Do copies between devices arrive? Probes them, and refuses a training for which they do not.

Under an IOMMU or with PCIe Access Control Services, copies between GPUs over PCIe can lose data without an error: CUDA
does not support peer-to-peer copies there (CUDA C++ programming guide, "IOMMU on Linux"; pytorch/pytorch#84803).
"""

from lit_cifar.copy_probe.collectives import collective_faults
from lit_cifar.copy_probe.copy_fault import CopyFault
from lit_cifar.copy_probe.probe import faults_of, probe
from lit_cifar.copy_probe.probe_process import ProbeError
from lit_cifar.copy_probe.transport import DeviceTransport, Transport

__all__ = [
    "CopyFault",
    "DeviceTransport",
    "ProbeError",
    "Transport",
    "collective_faults",
    "faults_of",
    "probe",
]
