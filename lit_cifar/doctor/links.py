"""The links between the GPUs that torch sees: what they are made of, what they should carry, and a picture."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_cifar.doctor.nvidia_smi import Ask, ask_nvidia_smi, driver_gpus, nvlink_gb_s, topology

# The kinds of `nvidia-smi topo -m`, from near to far.
_KINDS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "through the host",
    "SYS": "through the host, between sockets",
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
        """E.g. "NVLink x 12" or "PCIe, one switch"."""
        if self.kind.startswith("NV"):
            return f"NVLink x {self.kind[2:]}"
        return _KINDS.get(self.kind, _UNKNOWN)

    @property
    def color(self) -> str:
        """Of the line that stands for it."""
        if self.kind.startswith("NV"):
            return "#1a9850"
        return {"PIX": "#4575b4", "PXB": "#4575b4", "PHB": "#4575b4"}.get(self.kind, "#999999")


def find_links(ask: Ask = ask_nvidia_smi) -> list[Link]:
    """Between every ordered pair of the GPUs that torch sees."""
    count = torch.cuda.device_count()
    if count < 2:
        return []
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    peers = {
        (one, other)
        for one in range(count)
        for other in range(count)
        if one != other and torch.cuda.can_device_access_peer(one, other)
    }
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
    found = []
    for one, source in enumerate(uuids):
        for other, destination in enumerate(uuids):
            if one == other:
                continue
            ends = [known[uuid] for uuid in (source, destination) if uuid in known]
            kind = kinds.get((ends[0].index, ends[1].index), "") if len(ends) == 2 else ""
            if kind.startswith("NV"):
                each = nvlink_gb_s(ends[0].index, ask)
                capacity = None if each is None else each * int(re.sub(r"\D", "", kind) or 1)
            else:
                slots = [end.pcie_gb_s for end in ends if end.pcie_gb_s]
                capacity = min(slots) if kind and len(slots) == 2 else None
            found.append(Link(source=one, destination=other, kind=kind, peer=(one, other) in peers, gb_s=capacity))
    return found


def draw(links: Sequence[Link], file: Path) -> None:
    """Draw the GPUs in a circle, with a line for each link."""
    import math

    from matplotlib.figure import Figure

    count = max((link.source for link in links), default=-1) + 1
    angles = [math.pi / 2 - 2 * math.pi * index / max(count, 1) for index in range(count)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    drawn: set[str] = set()
    for link in links:
        if link.source < link.destination:
            (x0, y0), (x1, y1) = places[link.source], places[link.destination]
            label = link.in_words + ("" if link.peer else ", no direct copies")
            axes.plot(
                [x0, x1],
                [y0, y1],
                color=link.color,
                linewidth=2,
                linestyle="-" if link.peer else ":",
                label=None if label in drawn else label,
                zorder=1,
            )
            drawn.add(label)
    for index, (x, y) in enumerate(places):
        axes.plot([x], [y], "o", markersize=34, color="white", markeredgecolor="black", zorder=2)
        axes.text(x, y, f"GPU {index}", ha="center", va="center", fontsize=8, zorder=3)
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.axis("off")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.08), frameon=False)
    figure.savefig(file)
