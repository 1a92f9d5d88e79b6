"""Charts as SVG: lines, bars with intervals, and a matrix. Colours are classes of the page's style sheet.

A chart is 400 units wide: about a pixel each on a phone, where its text must be readable.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lit_cifar.html_report.axes import Axis, shown
from lit_cifar.html_report.markup import Markup, element, joined
from lit_cifar.reporting.rank_statistics import AccuracyCount

WIDTH = 400
NUM_LOOKS = 8  # colours in the style sheet
_MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",  # circle
    "M-3.2-3.2h6.4v6.4h-6.4z",  # square
    "M0-4.4L4.2 3.2h-8.4z",  # triangle
    "M0-4.6L4.6 0L0 4.6L-4.6 0z",  # diamond
    "M0 4.4L4.2-3.2h-8.4z",  # triangle that points down
)
_NUM_MARKERS = 12  # on a line
_CHAR = 6.2  # width of a character of the labels


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: Of the run and the metric.
        look: Which colour and marker.
        points: x and y, in the order of x.
        dashed: Whether it is dashed.
    """

    label: str
    look: int
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar of a chart.

    Attributes:
        label: Of the run.
        look: Which colour and marker.
        count: Its length is the accuracy.
        note: Goes behind its value, and marks the bar.
    """

    label: str
    look: int
    count: AccuracyCount
    note: str = ""


def marker(look: int, x: float, y: float, *, title: str | None = None) -> Markup:
    """The marker of a run at a place; `title` is shown when the mouse is on it."""
    shape = _MARKERS[look % len(_MARKERS)]
    tip = None if title is None else element("title", title)
    return element("path", tip, d=shape, transform=f"translate({x:.1f} {y:.1f})", class_=f"fill {_colour(look)}")


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    text: Callable[[float], str] = shown,
    zero: bool = False,
) -> Markup:
    """Lines over a common axis. Values that are not finite are left out.

    Args:
        lines: One or more, together with one finite point or more.
        title: What a screen reader says.
        x_label: Of the horizontal axis, with its unit.
        y_label: Of the vertical axis, with its unit.
        text: How a value of y is written.
        zero: Whether the vertical axis begins at 0.
    """
    height, bottom = 250, 210
    finite = [point for line in lines for point in line.points if math.isfinite(point[1])]
    ticks = [text(tick) for tick in Axis.around([y for _, y in finite], 0, 1, zero=zero).ticks]
    left = 14 + _CHAR * max(map(len, ticks))
    x_axis = Axis.around([x for x, _ in finite], left, WIDTH - 14, zero=True, whole=True)
    y_axis = Axis.around([y for _, y in finite], bottom, 28, zero=zero)
    drawn = [_horizontal(x_axis, 28, bottom, label=x_label), _vertical(y_axis, text, left, label=y_label)]
    drawn += [_line(line, x_axis, y_axis, text) for line in lines]
    return _picture(drawn, height, title)


def bar_chart(groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str) -> Markup:
    """Horizontal bars of accuracies with their 95 % intervals, in groups with a name at the left.

    Args:
        groups: One or more, each with one bar or more.
        title: What a screen reader says.
    """
    most = max(len(bars) for _, bars in groups)
    thickness = 14 if most == 1 else 11
    left = 12 + _CHAR * min(16, max(len(name) for name, _ in groups))
    axis = Axis.around([0, 1], left, WIDTH - 52, zero=True)
    rows, top = [], 8.0
    for name, bars in groups:
        middle = top + thickness * len(bars) / 2
        rows.append(_label(name, left - 6, middle + 4))
        for bar in bars:
            rows.append(_bar(bar, axis, top + thickness / 2, thickness - 3))
            top += thickness
        top += 7
    return _picture(
        [_horizontal(axis, 4, top, label="accuracy, %, with its 95 % interval", text=_percent), *rows], top + 38, title
    )


def matrix_chart(classes: Sequence[str], counts: Sequence[Sequence[int]], *, title: str) -> Markup:
    """Counts in cells: the right ones on the diagonal, the others as strong as they are frequent.

    Args:
        classes: Names of the rows and columns.
        counts: A row for each true class, a column for each predicted one.
        title: What a screen reader says.
    """
    left = 12 + _CHAR * min(16, max(map(len, classes)))
    side = (WIDTH - left - 6) / len(classes)
    top = left * 0.75 + 14
    totals = [sum(row) or 1 for row in counts]
    worst = max(
        (n / totals[i] for i, row in enumerate(counts) for j, n in enumerate(row) if i != j and n), default=1.0
    )
    drawn = [element("text", "predicted", x=float(WIDTH - 6), y=10.0, class_="axis end")]
    drawn.append(element("text", "true", x=left - 6, y=top - 6, class_="axis end"))
    for i, name in enumerate(classes):
        middle = (i + 0.5) * side
        drawn.append(_label(name, left - 6, top + middle + 4))
        turned = f"translate({left + middle + 3:.1f} {top - 6:.1f}) rotate(-50)"
        drawn.append(element("text", _short(name), transform=turned))
        for j, count in enumerate(counts[i]):
            share = count / totals[i]
            strength = share if i == j else share / worst
            tip = f"{name}, taken for {classes[j]}: {count:,} of {sum(counts[i]):,} ({share:.1%})"
            x, y = left + j * side, top + i * side
            drawn.append(_cell(count, x, y, side, strength, right=i == j, tip=tip))
    return _picture(drawn, top + side * len(classes) + 4, title)


def _cell(count: int, x: float, y: float, side: float, strength: float, *, right: bool, tip: str) -> Markup:
    kind = "right" if right else "wrong"
    box = element("rect", x=x + 0.5, y=y + 0.5, width=side - 1, height=side - 1, fill_opacity=strength, class_=kind)
    number = None
    if side >= 5.5 * len(f"{count}") + 3:  # it fits
        shade = "on" if strength > 0.55 else "zero" if not count else None
        number = element("text", f"{count}", x=x + side / 2, y=y + side / 2 + 4, class_=f"cell {shade or ''}".strip())
    return element("g", element("title", tip), element("rect", x=x, y=y, width=side, height=side, class_="grid"), box, number)


def _line(line: Line, x_axis: Axis, y_axis: Axis, text: Callable[[float], str]) -> Markup:
    """The line, broken where a value is not finite, with markers that say their values."""
    places = [(x_axis.at(x), y_axis.at(y)) if math.isfinite(y) else None for x, y in line.points]
    pieces = " ".join(_pieces(places))
    dash = " dashed" if line.dashed else ""
    path = element("path", d=pieces, class_=f"line {_colour(line.look)}{dash}")
    every = math.ceil(len(places) / _NUM_MARKERS)
    marks = [
        marker(line.look, *place, title=f"{line.label}, {shown(round(x, 2))}: {text(y)}")
        for index, (place, (x, y)) in enumerate(zip(places, line.points, strict=True))
        if place is not None and (len(places) - 1 - index) % every == 0
    ]
    return joined(path, *marks)


def _pieces(places: Iterable[tuple[float, float] | None]) -> Iterable[str]:
    command = "M"
    for place in places:
        if place is None:
            command = "M"
        else:
            yield f"{command}{place[0]:.1f} {place[1]:.1f}"
            command = "L"


def _bar(bar: Bar, axis: Axis, y: float, thickness: float) -> Markup:
    """The bar with its interval, its run's marker and its value; only words where there is nothing to count."""
    if not bar.count.total:
        return element("text", "no samples", x=axis.start + 4, y=y + 4, class_="value")
    low, high = bar.count.interval()
    ends, middle = (axis.at(low), axis.at(high)), axis.at(bar.count.accuracy)
    tip = f"{bar.label}: {bar.count.correct:,} of {bar.count.total:,}, 95 % interval {low:.1%} to {high:.1%}"
    return element(
        "g",
        element("title", f"{tip}, {bar.note}" if bar.note else tip),
        element(
            "rect",
            x=axis.start,
            y=y - thickness / 2,
            width=max(middle - axis.start, 0.5),
            height=thickness,
            class_=f"bar {_colour(bar.look)}",
        ),
        element("path", d=f"M{ends[0]:.1f} {y:.1f}H{ends[1]:.1f}", class_="interval"),
        marker(bar.look, middle, y),
        element("text", f"{bar.count.accuracy:.1%}{' !' if bar.note else ''}", x=ends[1] + 5, y=y + 4, class_="value"),
    )


def _horizontal(
    axis: Axis, top: float, bottom: float, *, label: str, text: Callable[[float], str] = shown
) -> Markup:
    """Lines across, numbers below them, and the label."""
    lines = "".join(f"M{axis.at(tick):.1f} {top:.1f}V{bottom:.1f}" for tick in axis.ticks)
    numbers = [element("text", text(tick), x=axis.at(tick), y=bottom + 15, class_="middle") for tick in axis.ticks]
    middle = (axis.start + axis.end) / 2
    name = element("text", label, x=middle, y=bottom + 33, class_="axis middle")
    return joined(element("path", d=lines, class_="grid"), *numbers, name)


def _vertical(axis: Axis, text: Callable[[float], str], left: float, *, label: str) -> Markup:
    lines = "".join(f"M{left:.1f} {axis.at(tick):.1f}H{WIDTH - 14}" for tick in axis.ticks)
    numbers = [element("text", text(tick), x=left - 6, y=axis.at(tick) + 4, class_="end") for tick in axis.ticks]
    return joined(element("path", d=lines, class_="grid"), *numbers, element("text", label, x=2, y=12, class_="axis"))


def _label(name: str, x: float, y: float) -> Markup:
    tip = element("title", name) if _short(name) != name else None
    return element("text", tip, _short(name), x=x, y=y, class_="end")


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}\N{HORIZONTAL ELLIPSIS}"


def _percent(value: float) -> str:
    return f"{value * 100:.6g}"


def _colour(look: int) -> str:
    return f"look{look % NUM_LOOKS}"


def _picture(drawn: Sequence[Markup], height: float, title: str) -> Markup:
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=title)
