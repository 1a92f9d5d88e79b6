"""Charts as SVG within a page: drawn by matplotlib, in colors that the page's style sheet defines.

A chart is 360 units wide: about a pixel each on a phone, where its text must be readable.
"""

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from lit_cifar.errors import printable
from lit_cifar.reporting.rank_statistics import AccuracyCount
from lit_cifar.reporting.run_reader import Confusion

# The colors of the page by name, in its light and its dark look. Charts are drawn in the light ones.
COLORS = {
    "ground": ("#fdfdfc", "#15181b"),
    "raised": ("#f4f4f1", "#1e2226"),
    "shade": ("#c9ccca", "#4a525a"),
    "ink": ("#1d2125", "#e4e6e8"),
    "quiet": ("#5c646c", "#9aa3ab"),
    "rule": ("#dfe1e0", "#343a40"),
    "run0": ("#2563a8", "#6cb0f5"),
    "run1": ("#c2571a", "#f09a5e"),
    "run2": ("#1f7a4d", "#63c793"),
    "run3": ("#8a3ea8", "#cf94e8"),
    "run4": ("#9a6b00", "#dcb750"),
    "run5": ("#0f7c8a", "#56c4d2"),
    "run6": ("#b8326a", "#f287b3"),
    "run7": ("#5a5f66", "#aeb5bc"),
}
# matplotlib's markers, and the characters that look like them.
MARKERS = {
    "o": "\N{BLACK CIRCLE}",
    "s": "\N{BLACK SQUARE}",
    "^": "\N{BLACK UP-POINTING TRIANGLE}",
    "D": "\N{BLACK DIAMOND}",
    "v": "\N{BLACK DOWN-POINTING TRIANGLE}",
}
_NAMES = {light: name for name, (light, _) in COLORS.items()}
_INK, _QUIET, _RULE, _GROUND = (COLORS[name][0] for name in ("ink", "quiet", "rule", "ground"))
_STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "text.parse_math": False, "font.size": 11, "lines.linewidth": 1.75},
    **{"text.color": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.labelcolor": _QUIET},
    **{"xtick.major.size": 0, "xtick.minor.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0},
    **{"axes.autolimit_mode": "round_numbers", "axes.xmargin": 0, "axes.ymargin": 0},
    **{"axes.axisbelow": True, "grid.color": _RULE, "grid.linewidth": 0.75},
}
_WIDTH = 360
_NUM_MARKERS = 12  # of a line
_LONGEST = 16  # characters of a label
_MOST_TURNED = 12  # classes of a matrix whose names rise to the right; of more they stand upright
_LINE_HEIGHT, _DIGIT = 12, 6.5  # of text, and the width of a digit
_DARK = 0.7  # a cell on which the color of text would be hard to read
_BAR, _GAP = 12, 7


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str  # of its run and metric
    run: int  # place of the run in the list, which chooses color and marker
    points: Sequence[tuple[float, float]]  # in the order of x; where y is not finite the line is broken
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar of a chart."""

    name: str  # of its run
    run: int  # as of a line
    count: AccuracyCount  # its accuracy is the length of the bar
    marked: bool = False  # whether an exclamation mark follows the value


class Chart:
    """A drawing with its title, and with what is said of its parts when the mouse is on them."""

    def __init__(self, title: str, *, height: float, note: str | None = None) -> None:
        self.title, self.note, self.height = title, note, height
        self.figure = Figure(figsize=(_WIDTH / 72, height / 72), frameon=False, layout="constrained")
        self.axes = self.figure.add_subplot(frameon=False)
        self._tips: list[str] = []

    def add(self, artist: Artist, tip: str) -> None:
        """Say `tip` of a part."""
        artist.set(gid=f"tip{len(self._tips)}", clip_on=False)
        self._tips.append(tip)

    def add_marker(self, run: int, x: float, y: float, tip: str) -> None:
        """The marker of a run at a place."""
        shape = list(MARKERS)[run % len(MARKERS)]
        self.add(self.axes.scatter([x], [y], s=34, color=_color(run), marker=shape, edgecolors="none"), tip)

    def name(self, axis: Axis, places: Sequence[float], names: Sequence[str]) -> None:
        """Write names along an axis; of a long one the beginning, with the whole as a tip."""
        axis.set_ticks(places, [*map(_shortened, names)])
        for label, name in zip(axis.get_ticklabels(), names, strict=True):
            if label.get_text() != name:
                self.add(label, name)

    @rc_context(_STYLE)
    def svg(self) -> Markup:
        """The element, without anything that would act on the rest of the page or refer to it."""
        file = StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # the browser has other fonts
            self.figure.savefig(file, format="svg")
        drawn = file.getvalue().partition("</defs>")[2].rpartition("</svg>")[0]  # without matplotlib's style sheet
        drawn = re.sub(r"<[^>]*>", self._tag, re.sub(r"\s*\n\s*", "", drawn))
        element = '<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>'
        return Markup(element).format(_WIDTH, self.height, self.title, Markup(drawn))

    def _tag(self, found: re.Match[str]) -> str:
        """A tag as short as it can be, with a color's name for its value, and what is said of the part."""
        tag = re.sub(r" font-family: [^;]*;", "", found[0])
        tag = re.sub(r"(\.\d\d)\d+", r"\1", tag)
        tag = re.sub(r"#[0-9a-f]{6}", lambda value: f"var(--{_NAMES[value[0]]})", tag)
        tip = re.search(r'id="tip(\d+)"', tag)
        tag = re.sub(r' id="[^"]*"', "", tag)
        return f"{tag}<title>{escape(self._tips[int(tip[1])])}</title>" if tip else tag


def _color(run: int) -> str:
    colors = [light for name, (light, _) in COLORS.items() if name.startswith("run")]
    return colors[run % len(colors)]


def _shortened(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"


@rc_context(_STYLE)
def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_name: str,
    y_name: str,
    text: Callable[[float], str],
    zero: bool,
    note: str | None,
) -> Chart:
    """Draw lines with markers, over an axis that begins at 0. Together they have one finite value or more.

    `text` writes a value of the vertical axis, which begins at 0 with `zero`.
    """
    chart = Chart(title, height=250, note=note)
    axes = chart.axes
    for line in lines:
        values = [(x, y if math.isfinite(y) else math.nan) for x, y in line.points]
        dash = (0, (3, 2)) if line.dashed else "solid"
        axes.plot(*zip(*values, strict=True), color=_color(line.run), linestyle=dash, clip_on=False)
        every = math.ceil(len(values) / _NUM_MARKERS)  # counted from the end, whose value is the result
        for x, y in values[::-every]:
            if math.isfinite(y):
                chart.add_marker(line.run, x, y, f"{line.name}, {x_name} {round(x, 2):,.6g}: {text(y)}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=axis is axes.xaxis))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: text(value))
    axes.set(xlim=(0, None), ylim=(0 if zero else None, None), xlabel=x_name)
    axes.set_title(y_name, loc="left", fontsize=11, color=_QUIET)
    axes.grid(clip_on=False)
    return chart


@rc_context(_STYLE)
def bar_chart(title: str, groups: Sequence[tuple[str, Sequence[Bar]]], *, note: str | None) -> Chart:
    """Draw accuracies as horizontal bars with their 95 % intervals, in groups with a name each."""
    height = sum(_BAR * len(bars) + _GAP for _, bars in groups)
    chart = Chart(title, height=height + 48, note=note)
    middles, top = [], 0.0
    for _, bars in groups:
        for index, bar in enumerate(bars):
            _draw_bar(chart, bar, top + _BAR * (index + 0.5))
        middles.append(top + _BAR * len(bars) / 2)
        top += _BAR * len(bars) + _GAP
    axes = chart.axes
    axes.set(xlim=(0, 1), ylim=(height, 0), xlabel="accuracy, %, with its 95 % interval")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f}")
    chart.name(axes.yaxis, middles, [name for name, _ in groups])
    axes.grid(axis="x", clip_on=False)
    return chart


def _draw_bar(chart: Chart, bar: Bar, y: float) -> None:
    """The bar, its interval, the marker of its run and its value; only words where nothing was counted."""
    count, axes = bar.count, chart.axes
    value, end = "no samples", 0.0
    if count.total:
        low, end = count.interval()
        value = f"{count.accuracy:.1%}{' !' if bar.marked else ''}"
        tip = f"{bar.name}: {count.correct:,} of {count.total:,}, 95 % interval {low:.1%} to {end:.1%}"
        chart.add(axes.barh([y], [count.accuracy], _BAR - 3, color=_color(bar.run), alpha=0.45)[0], tip)
        axes.plot([low, end], [y, y], color=_INK, linewidth=1, clip_on=False)
        chart.add_marker(bar.run, count.accuracy, y, tip)
    axes.annotate(value, (end, y), xytext=(5, 0), textcoords="offset points", va="center", annotation_clip=False)


@rc_context(_STYLE)
def matrix_chart(title: str, confusion: Confusion, chosen: Sequence[int], *, note: str | None) -> Chart:
    """Draw the confusion of the chosen classes. A wrong cell is as strong as its share of the true class."""
    names = [confusion.classes[index] for index in chosen]
    label = _DIGIT * max(len(_shortened(name)) for name in names)
    width = (_WIDTH - 30 - label * (1.65 if len(names) <= _MOST_TURNED else 1)) / len(names)
    chart = Chart(title, height=len(names) * max(width, _LINE_HEIGHT) + 28 + label, note=note)
    totals = [confusion.of_class(index).total for index in chosen]
    counts = [[confusion.counts[i][j] for j in chosen] for i in chosen]
    shares = [[count / (total or 1) for count in row] for row, total in zip(counts, totals, strict=True)]
    worst = max((share for i, row in enumerate(shares) for j, share in enumerate(row) if i != j), default=0) or 1
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            strength = shares[i][j] / (1 if i == j else worst)
            if count:
                tip = f"{names[i]}, taken for {names[j]}: {count:,} of {totals[i]:,}, {shares[i][j]:.1%}"
                chart.add(_cell(chart, i, j, strength), tip)
            if width >= _DIGIT * len(str(count)) + 3:
                shade = _GROUND if strength > _DARK else _INK if count else _RULE
                number = chart.axes.text(j + 0.5, i + 0.5, str(count), color=shade, fontsize=10)
                number.set(ha="center", va="center", in_layout=False)  # hundreds of them would slow the layout
    _name_classes(chart, names)
    return chart


def _cell(chart: Chart, i: int, j: int, strength: float) -> Artist:
    color = to_rgba(_color(0 if i == j else 1), strength)
    cell = chart.axes.add_patch(Rectangle((j, i), 1, 1, facecolor=color, linewidth=0))
    cell.set_in_layout(False)
    return cell


def _name_classes(chart: Chart, names: Sequence[str]) -> None:
    """The true ones at the left, the predicted ones above."""
    axes, num_classes = chart.axes, len(names)
    axes.set(xlim=(0, num_classes), ylim=(num_classes, 0), xlabel="predicted", ylabel="true")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    for axis in (axes.xaxis, axes.yaxis):
        chart.name(axis, [index + 0.5 for index in range(num_classes)], names)
        axis.set_ticks(range(num_classes + 1), minor=True)
    for label in axes.get_xticklabels():
        if num_classes > _MOST_TURNED:
            label.set(rotation=90, fontsize=9)
        else:
            label.set(rotation=50, ha="left", rotation_mode="anchor")
    axes.grid(which="minor", clip_on=False)
