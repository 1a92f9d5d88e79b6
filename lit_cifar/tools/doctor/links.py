"""The links between the GPUs: what they are made of, what they can carry, and whether copies over them arrive."""

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch

from lit_cifar.strategies.device_copies import CopyFault, copy_faults
from lit_cifar.tools.doctor import COPY_MODES, Check, Finding

Ask = Callable[[Sequence[str]], str]
"""Runs `nvidia-smi` with arguments; returns what it prints, "" where there is none."""

_QUERY = ["--query-gpu=index,uuid,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits"]
_GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a PCIe lane in one direction, by generation, without packet headers."""
# The kinds of `nvidia-smi topo -m`, from near to far.
_KINDS = {
    "PIX": "PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe, CPU",
    "NODE": "host",
    "SYS": "host, sockets",
}
_MOST_PAIRS = 6  # that are named in a sentence
_MEND = "turn off the IOMMU or PCIe ACS in the BIOS, or boot with iommu=pt   # until then use ddp, see docs/doctor.md"


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver sees it."""

    index: int  # of the driver, which may differ from torch's
    uuid: str  # without the prefix "GPU-"
    pcie_gb_s: float | None  # what its PCIe slot can carry in one direction; None if unknown


@dataclass(frozen=True, kw_only=True)
class Link:
    """From one GPU to another, by torch's indices."""

    source: int
    destination: int
    kind: str  # as in `nvidia-smi topo -m`; "" if unknown
    peer: bool  # one can read the other's memory
    gb_s: float | None  # what it should carry in one direction, at most; None if unknown

    @property
    def in_words(self) -> str:
        """E.g. "NVLink x 12" or "PCIe switch"."""
        return f"NVLink x {self.kind[2:]}" if self.kind.startswith("NV") else _KINDS.get(self.kind, "not known")


def ask_nvidia_smi(arguments: Sequence[str]) -> str:
    """What `nvidia-smi` prints."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def driver_gpus(ask: Ask = ask_nvidia_smi) -> list[DriverGpu]:
    """The GPUs of this machine, also those that torch cannot use."""
    found = []
    for line in ask(_QUERY).splitlines():
        index, uuid, generation, width = (cell.strip() for cell in line.split(","))
        lane = _GB_PER_LANE.get(int(generation)) if generation.isdecimal() else None
        capacity = lane * int(width) if lane and width.isdecimal() else None
        found.append(DriverGpu(int(index), uuid.removeprefix("GPU-"), capacity))
    return found


def driver_version(ask: Ask = ask_nvidia_smi) -> tuple[str, str] | None:
    """Versions of the driver and of the newest CUDA that it runs; None without a driver."""
    page = ask([])
    driver = re.search(r"Driver Version: ([\d.]+)", page)
    cuda = re.search(r"CUDA (?:UMD )?Version: (\d+\.\d+)", page)
    return (driver[1], cuda[1]) if driver and cuda else None


def topology(ask: Ask = ask_nvidia_smi) -> dict[tuple[int, ...], str]:
    """Links between GPUs as in `nvidia-smi topo -m`: by two indices of the driver, e.g. "NV12", "PIX" or "SYS"."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in ask(["topo", "-m"]).splitlines()]
    header: list[str] = next((cells for cells in lines if cells[:1] == ["GPU0"] and cells[1:2] != ["X"]), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)]
    rows = [cells for cells in lines if cells and cells is not header and re.fullmatch(r"GPU\d+", cells[0])]
    return {
        (int(name[3:]), column): kind
        for name, *kinds in rows
        for column, kind in zip(columns, kinds, strict=False)
        if kind != "X"
    }


def find_links(ask: Ask = ask_nvidia_smi) -> list[Link]:
    """Between every ordered pair of the GPUs that torch sees."""
    count = torch.cuda.device_count()
    if count < 2:
        return []
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    peers = {pair for pair in permutations(range(count), 2) if torch.cuda.can_device_access_peer(*pair)}
    return links_between(uuids, peers, ask)


def links_between(uuids: Sequence[str], peers: set[tuple[int, int]], ask: Ask) -> list[Link]:
    """Between GPUs whose `uuids` are in torch's order, which may leave some out; `peers` are pairs of that order."""

    @cache
    def nvlink_gb_s(index: int) -> float | None:
        """What one NVLink of a GPU carries in one direction; None without an NVLink."""
        speed = re.search(r"Link \d+: ([\d.]+) GB/s", ask(["nvlink", "-s", "-i", str(index)]))
        return float(speed[1]) if speed else None

    def capacity(kind: str, ends: Sequence[DriverGpu]) -> float | None:
        """In GB/s: of all NVLinks together, or of the slower PCIe slot; None if the driver does not say."""
        if kind.startswith("NV"):
            each = nvlink_gb_s(ends[0].index)
            return None if each is None else each * int(kind[2:])
        slots = [end.pcie_gb_s for end in ends if end.pcie_gb_s is not None]
        return min(slots) if kind and len(slots) == 2 else None

    known = {gpu.uuid: gpu for gpu in driver_gpus(ask)}
    kinds = topology(ask)
    found = []
    for one, other in permutations(range(len(uuids)), 2):
        ends = [known[uuids[index]] for index in (one, other) if uuids[index] in known]
        kind = kinds.get(tuple(end.index for end in ends), "")
        is_peer = (one, other) in peers
        found.append(Link(source=one, destination=other, kind=kind, peer=is_peer, gb_s=capacity(kind, ends)))
    return found


def check_copies(
    devices: Sequence[torch.device],
    *,
    report: Callable[[str], None],
    find: Callable[[Sequence[torch.device]], list[CopyFault]] = copy_faults,
) -> Check:
    """Copy between every ordered pair of GPUs, as before `dp`, `mp` and `ddp_mp` train."""
    if len(devices) < 2:
        return Check("GPU to GPU", f"not tried: that needs two GPUs, and torch sees {len(devices) or 'none'}")
    num_pairs = len(devices) * (len(devices) - 1)
    report(f"copies between {len(devices)} devices")
    try:
        faults = find(devices)
    except RuntimeError as error:
        problem = f"Copies between devices could not be tried: {str(error).splitlines()[0]}."
        return Check("GPU to GPU", "not tried", [Finding("copies", problem, "nvidia-smi", COPY_MODES)])
    if not faults:
        return Check("GPU to GPU", f"all of {num_pairs} ordered pairs copied every byte")
    pairs = [f"{fault.source} to {fault.destination}" for fault in faults]
    more = f" and {len(pairs) - _MOST_PAIRS} more" if len(pairs) > _MOST_PAIRS else ""
    problem = f"Copies between devices do not arrive ({', '.join(pairs[:_MOST_PAIRS])}{more}): {faults[0]}."
    seen = f"faults in {len(pairs)} of {num_pairs} ordered pairs"
    return Check("GPU to GPU", seen, [Finding("copies", problem, _MEND, COPY_MODES)])
