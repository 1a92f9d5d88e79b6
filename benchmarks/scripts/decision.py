"""Draw the decision tree of docs/choosing.md from the text block in that page, so that the two say the same."""

from pathlib import Path

import notebooks_path  # noqa: F401  # for `analysis`
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.run_frames import BLUE, GREY

FIRST, SECOND, ANSWER, MODE = 0.0, 3.1, 5.0, 10.2  # x of the first question, the second ones, their answers, the modes
Tree = dict[str, list[tuple[str, str]]]


def tree(page: Path) -> tuple[str, Tree]:
    """The first question; each second question, after the answer that leads to it, with its answers and their modes."""
    block = page.read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    first, *lines = block.splitlines()
    second: Tree = {}
    for line in lines:
        if line.startswith("    "):
            answer, mode = line.strip().rsplit(": ", 1)
            second[next(reversed(second))].append((answer, mode))
        else:
            second[line.strip()] = []
    return first, second


def decision(page: Path) -> Figure:
    """Questions at the left, modes at the right."""
    first, second = tree(page)
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    axes = figure.subplots()
    rows = sum(map(len, second.values()))
    axes.set(xlim=(-1.3, MODE + 0.9), ylim=(rows - 0.4, -0.6))
    axes.axis("off")
    top = 0
    for question, answers in second.items():
        middle = top + (len(answers) - 1) / 2
        _line(axes, (FIRST, (rows - 1) / 2), (SECOND, middle))
        for row, (answer, mode) in enumerate(answers, top):
            _line(axes, (SECOND, middle), (ANSWER - 0.1, row))
            axes.text(ANSWER, row, answer, va="center", fontsize=9)
            _box(axes, MODE, row, mode, color="white", fill=BLUE)
        _box(axes, SECOND, middle, question.replace(": ", "\n"))
        top += len(answers)
    _box(axes, FIRST, (rows - 1) / 2, first.replace(" fit ", " fit\n"))
    return figure


def _line(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.plot(*zip(start, end, strict=True), color=GREY, linewidth=1, zorder=0)


def _box(axes: Axes, x: float, y: float, text: str, *, color: str = "black", fill: str = "#eef2fb") -> None:
    frame = {"boxstyle": "round,pad=0.45", "facecolor": fill, "edgecolor": BLUE}
    axes.text(x, y, text, color=color, ha="center", va="center", fontsize=9, bbox=frame)
