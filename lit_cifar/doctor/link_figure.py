"""A picture of the GPUs and the links between them."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_cifar.doctor.links import Link

_NVLINK, _PCIE, _HOST = "#1a9850", "#4575b4", "#999999"


def draw(links: Sequence[Link], file: Path) -> None:
    """Draw the GPUs in a circle, with a line for each pair: dotted where one cannot read the other's memory."""
    figure = Figure(figsize=(6, 7), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.axis("off")
    if links:
        _draw_all(axes, links)
        figure.legend(loc="outside lower center", ncols=1, frameon=False)
    else:
        axes.text(0, 0, "torch sees fewer than two GPUs", ha="center")
    figure.savefig(file)


def _draw_all(axes: Axes, links: Sequence[Link]) -> None:
    count = 1 + max(link.source for link in links)
    angles = [math.pi * (1 - 2 * index / count) for index in range(count)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    explained: set[str] = set()
    for link in links:
        if link.source < link.destination:
            ends = zip(places[link.source], places[link.destination], strict=True)
            label = link.in_words + ("" if link.peer else ", no direct copies")
            shown = None if label in explained else label
            axes.plot(
                *ends, color=_color(link), linestyle="-" if link.peer else ":", linewidth=2, label=shown, zorder=1
            )
            explained.add(label)
    for index, (x, y) in enumerate(places):
        axes.plot([x], [y], "o", markersize=36, color="white", markeredgecolor="black", zorder=2)
        axes.text(x, y, f"GPU {index}", ha="center", va="center", fontsize=8, zorder=3)


def _color(link: Link) -> str:
    if link.kind.startswith("NV"):
        return _NVLINK
    return _PCIE if link.kind in ("PIX", "PXB", "PHB") else _HOST
