"""Charts by matplotlib, each as an image that the page itself holds."""

import math
import warnings
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lit_cifar.errors import printable
from lit_cifar.reporting.figures import shortened
from lit_cifar.reporting.rank_statistics import AccuracyCount

# Text stays text, in the fonts of the reader, and a dollar sign in a name begins no formula.
_STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "font.family": "sans-serif", "text.parse_math": False, "legend.frameon": False},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3},
    **{"axes.axisbelow": True, "figure.constrained_layout.use": True},
}
_WIDTH = 6.4  # inches
_MOST_MARKERS = 30  # most points of a line that get markers


@dataclass(frozen=True)
class Line:
    name: str
    run: int  # place of the run in the list, which chooses the color
    points: Sequence[tuple[float, float]]  # the line is broken where y is not finite
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar of a chart: the accuracy of a part of the images in a run."""

    run: int
    count: AccuracyCount
    marked: bool = False  # whether an exclamation mark follows the value


@rc_context(_STYLE)
def line_chart(title: str, lines: Sequence[Line], *, x_name: str, percent: bool = False, zero: bool = False) -> Figure:
    """Draw lines over an axis that begins at 0; the vertical axis does so with `zero`."""
    figure = Figure(figsize=(_WIDTH, 4))
    axes = figure.add_subplot()
    for line in lines:
        marker = ".s^Dv"[line.run // 10 % 5] if line.run >= 10 or len(line.points) <= _MOST_MARKERS else ""
        style: Any = {"color": f"C{line.run}", "linestyle": "--" if line.dashed else "-", "marker": marker}
        style["fillstyle"] = "none" if line.dashed else "full"  # one epoch is a point and no line
        axes.plot(*zip(*line.points, strict=True), label=_end_of(line.name), **style)
    missing = sum(not math.isfinite(y) for line in lines for _, y in line.points)
    axes.set_title(f"{title}\nnot shown: {missing} values that are nan or infinite" if missing else title)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if zero:
        axes.update_datalim([(0, 0)])  # the margin above is then a part of the whole height
    axes.set(xlim=(0, None), ylim=(0 if zero else None, None), xlabel=x_name)
    axes.legend()
    return figure


@rc_context(_STYLE)
def bar_chart(title: str, groups: Sequence[tuple[str, Sequence[Bar]]], *, names: Sequence[str]) -> Figure:
    """Draw accuracies as horizontal bars with their 95 % intervals, in groups with a name each; `names` are of runs."""
    num_bars = sum(len(bars) for _, bars in groups)
    figure = Figure(figsize=(_WIDTH, 1.5 + 0.2 * (num_bars + len(groups) * 0.5)))
    axes = figure.add_subplot()
    ticks, y, labelled = [], 0.0, set[int]()
    for _, bars in groups:
        ticks.append(y + (len(bars) - 1) / 2)
        for bar in bars:
            low, high = bar.count.interval() if bar.count.total else (0.0, 0.0)
            label = None if bar.run in labelled else _end_of(names[bar.run])
            labelled.add(bar.run)
            axes.barh(y, bar.count.accuracy, 0.8, color=f"C{bar.run}", alpha=0.5, label=label)
            axes.plot([low, high], [y, y], color="black", linewidth=1)
            value = f"{bar.count.accuracy:.1%}{' !' if bar.marked else ''}" if bar.count.total else "no samples"
            axes.annotate(value, (high, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
            y += 1
        y += 0.5
    axes.set_yticks(ticks, [shortened(name) for name, _ in groups])
    axes.set(xlim=(0, 1), ylim=(y, -1), xlabel="accuracy with its 95 % interval", title=title)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(visible=False, axis="y")
    said = (f"{printable(name)}: {bar.count.correct} of {bar.count.total}" for name, bars in groups for bar in bars)
    figure.set_label("; ".join(said))  # whole names, for a search or a screen reader
    if len(names) > 1:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _end_of(name: str) -> str:
    """The end of a long name. matplotlib's legends leave out names that begin with an underscore."""
    name = printable(name)
    return name if len(name) <= 40 and not name.startswith("_") else f"\N{HORIZONTAL ELLIPSIS}{name[-39:]}"


@rc_context(_STYLE)
def image_of(figure: Figure) -> Markup:
    """The figure as an element that loads nothing and acts on nothing else in the page."""
    file = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # the browser has its own fonts
        figure.savefig(file, format="svg")
    title = " ".join(axes.get_title() for axes in figure.axes if axes.get_title())
    element = '<img alt="{}" src="data:image/svg+xml;base64,{}">'
    alt = f"{title}. {figure.get_label()}" if figure.get_label() else title
    return Markup(element).format(alt, b64encode(file.getvalue()).decode())
