"""The rows of `bench` as a picture: how far each is from its goal."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure

from lit_cifar.bench.rows import Row, shown

_TICKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
_BLUE, _ORANGE = "#2f6db5", "#d98c1f"


def draw(rows: Sequence[Row], *, title: str) -> Figure:
    """A bar for each row with a goal, to the right of the line if it is met; the whisker is the middle half.

    The axis is logarithmic and shows value over goal, or goal over value where small is good.
    """
    goals = [row for row in rows if row.goal is not None]
    figure = Figure(figsize=(11, 1.2 + 0.4 * len(goals)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(goals):
        low, middle, high = sorted(_share(row, value) for value in (row.found.low, row.found.median, row.found.high))
        color = _BLUE if row.met else _ORANGE
        axes.barh(place, middle - 1, left=1, height=0.6, color=color)
        axes.plot([low, high], [place, place], color="#444444", linewidth=1.5)
        assert row.goal is not None
        words = f"{shown(row.found.median, row.unit)}, goal {row.goal.in_words(row.unit)}"
        axes.text(1.02, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    shares = [_share(row, value) for row in goals for value in (row.found.low, row.found.median, row.found.high)]
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [f"{tick:g}x" for tick in _TICKS])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(goals)), [fill(row.name, 52) for row in goals], fontsize=8)
    axes.set_xlim(0.9 * min([0.5, *shares]), 1.1 * max([2, *shares]))
    axes.set_ylim(len(goals) - 0.4, -0.6)
    axes.set_xlabel("times the goal; right of the line it is met")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def save(rows: Sequence[Row], path: Path, *, title: str) -> None:
    draw(rows, title=title).savefig(path, dpi=150)


def _share(row: Row, value: float) -> float:
    """By what factor a value is better than the goal; a difference of nothing or less is 100 times as good."""
    assert row.goal is not None
    if row.goal.at_least is not None:
        return value / row.goal.bound
    return row.goal.bound / max(value, row.goal.bound / 100)
