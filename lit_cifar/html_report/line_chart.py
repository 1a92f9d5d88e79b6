"""Lines over a common axis."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lit_cifar.html_report.axes import Axis
from lit_cifar.html_report.markup import Markup, element, joined
from lit_cifar.html_report.svg import CHARACTER, WIDTH, color, horizontal, marker, picture, vertical

_TOP, _BOTTOM, _RIGHT = 28, 210, WIDTH - 12
_NUM_MARKERS = 12  # of a line


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: Of its run and metric.
        run: Place of the run in the list, which chooses color and marker.
        points: x and y, in the order of x.
        dashed: Whether it is dashed.
    """

    name: str
    run: int
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def line_chart(
    lines: Sequence[Line], *, title: str, x_name: str, y_name: str, text: Callable[[float], str], zero: bool = False
) -> Markup:
    """Draw lines with markers. Values that are not finite are left out, and the line is broken there.

    Args:
        lines: Together they have one finite value or more.
        title: What a screen reader says.
        x_name: Of the horizontal axis, with its unit; it begins at 0.
        y_name: Of the vertical axis, with its unit.
        text: How a value of y is written.
        zero: Whether the vertical axis begins at 0.
    """
    finite = [point for line in lines for point in line.points if math.isfinite(point[1])]
    y_axis = Axis.around([y for _, y in finite], _BOTTOM, _TOP, zero=zero)
    left = 14 + CHARACTER * max(len(text(tick)) for tick in y_axis.ticks)
    x_axis = Axis.around([x for x, _ in finite], left, _RIGHT, zero=True, whole=True)
    drawn = [
        horizontal(x_axis, _TOP, _BOTTOM, name=x_name, text=lambda value: f"{value:,.0f}"),
        vertical(y_axis, left, _RIGHT, name=y_name, text=text),
        *(_draw(line, x_axis, y_axis, x_name, text) for line in lines),
    ]
    return picture(drawn, height=_BOTTOM + 40, title=title)


def _draw(line: Line, x_axis: Axis, y_axis: Axis, x_name: str, text: Callable[[float], str]) -> Markup:
    places = [(x_axis.at(x), y_axis.at(y)) if math.isfinite(y) else None for x, y in line.points]
    kind = f"line {color(line.run)}{' dashed' if line.dashed else ''}"
    every = math.ceil(len(places) / _NUM_MARKERS)  # counted from the end, whose value is the result
    markers = [
        marker(line.run, *place, title=f"{line.name}, {x_name} {round(x, 2):,.6g}: {text(y)}")
        for index, (place, (x, y)) in enumerate(zip(places, line.points, strict=True))
        if place is not None and (len(places) - 1 - index) % every == 0
    ]
    return joined(element("path", d="".join(_strokes(places)), class_=kind), *markers)


def _strokes(places: Iterable[tuple[float, float] | None]) -> Iterable[str]:
    move = "M"
    for place in places:
        if place is not None:
            yield f"{move}{place[0]:.1f} {place[1]:.1f}"
        move = "M" if place is None else "L"
