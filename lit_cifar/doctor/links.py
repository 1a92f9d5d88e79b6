"""The links between the GPUs that torch sees: what they are made of, and what they can carry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from lit_cifar.doctor.nvidia_smi import Ask, DriverGpu, ask_nvidia_smi, driver_gpus, nvlink_gb_s, topology

# The kinds of `nvidia-smi topo -m`, from near to far.
_KINDS = {
    "PIX": "PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe, CPU",
    "NODE": "host",
    "SYS": "host, sockets",
}
_UNKNOWN = "not known"


@dataclass(frozen=True, kw_only=True)
class Link:
    """From one GPU to another.

    Attributes:
        source: Index of torch.
        destination: Likewise.
        kind: As in `nvidia-smi topo -m`; "" if unknown.
        peer: Whether one GPU can read the other's memory.
        gb_s: What it should carry in one direction, at most; None if unknown.
    """

    source: int
    destination: int
    kind: str
    peer: bool
    gb_s: float | None

    @property
    def in_words(self) -> str:
        """E.g. "NVLink x 12" or "PCIe switch"."""
        if self.kind.startswith("NV"):
            return f"NVLink x {self.kind[2:]}"
        return _KINDS.get(self.kind, _UNKNOWN)


def find_links(ask: Ask = ask_nvidia_smi) -> list[Link]:
    """Between every ordered pair of the GPUs that torch sees."""
    count = torch.cuda.device_count()
    if count < 2:
        return []
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    peers = {pair for pair in permutations(range(count), 2) if torch.cuda.can_device_access_peer(*pair)}
    return links_between(uuids, peers, ask)


def links_between(uuids: Sequence[str], peers: set[tuple[int, int]], ask: Ask) -> list[Link]:
    """The links between GPUs, by torch's order of them.

    Args:
        uuids: Of the GPUs in torch's order, which may leave some out.
        peers: Pairs of which the first can read the memory of the second.
        ask: `nvidia-smi`.
    """
    known = {gpu.uuid: gpu for gpu in driver_gpus(ask)}
    kinds = topology(ask)
    speeds = {index: nvlink_gb_s(index, ask) for index in {one for (one, _), kind in kinds.items() if "NV" in kind}}
    found = []
    for one, other in permutations(range(len(uuids)), 2):
        ends = [known[uuids[index]] for index in (one, other) if uuids[index] in known]
        kind = kinds.get((ends[0].index, ends[1].index), "") if len(ends) == 2 else ""
        capacity = _capacity(kind, ends, speeds) if kind else None
        found.append(Link(source=one, destination=other, kind=kind, peer=(one, other) in peers, gb_s=capacity))
    return found


def _capacity(kind: str, ends: Sequence[DriverGpu], nvlink_speeds: Mapping[int, float | None]) -> float | None:
    """In GB/s: of all NVLinks together, or of the slower PCIe slot; None if the driver does not say."""
    if kind.startswith("NV"):
        each = nvlink_speeds[ends[0].index]
        return None if each is None else each * int(kind[2:])
    slots = [end.pcie_gb_s for end in ends]
    return None if None in slots else min(slot for slot in slots if slot is not None)
