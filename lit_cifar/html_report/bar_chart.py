"""Accuracies as horizontal bars with their 95 % intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_cifar.html_report.axes import Axis
from lit_cifar.html_report.markup import Markup, element
from lit_cifar.html_report.svg import WIDTH, color, horizontal, label, label_space, marker, picture
from lit_cifar.reporting.rank_statistics import AccuracyCount

_TOP, _RIGHT = 8.0, WIDTH - 50
_BETWEEN = 7  # groups


@dataclass(frozen=True)
class Bar:
    """A bar of a chart.

    Attributes:
        name: Of its run.
        run: Place of the run in the list, which chooses color and marker.
        count: Its accuracy is the length of the bar.
        marked: Whether an exclamation mark follows its value.
    """

    name: str
    run: int
    count: AccuracyCount
    marked: bool = False


def bar_chart(groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str) -> Markup:
    """Draw bars in groups with a name each.

    Args:
        groups: One or more, each with one bar or more.
        title: What a screen reader says.
    """
    thickness = 14 if all(len(bars) == 1 for _, bars in groups) else 12
    axis = Axis.around([0, 1], 12 + label_space([name for name, _ in groups]), _RIGHT)
    rows, top = [], _TOP
    for name, bars in groups:
        rows.append(label(name, axis.start - 6, top + thickness * len(bars) / 2 + 4))
        rows += [_draw(bar, axis, top + thickness * (index + 0.5), thickness - 3) for index, bar in enumerate(bars)]
        top += thickness * len(bars) + _BETWEEN
    name = "accuracy, %, with its 95 % interval"
    scale = horizontal(axis, _TOP - 4, top, name=name, text=lambda value: f"{value * 100:.0f}")
    return picture([scale, *rows], height=top + 40, title=title)


def _draw(bar: Bar, axis: Axis, y: float, thickness: float) -> Markup:
    """The bar, its interval, the marker of its run and its value; only words where nothing was counted."""
    count = bar.count
    if not count.total:
        return element("text", "no samples", x=axis.start + 4, y=y + 4)
    low, high = count.interval()
    end = axis.at(count.accuracy)
    kind = f"bar {color(bar.run)}"
    return element(
        "g",
        element("title", f"{bar.name}: {count.correct:,} of {count.total:,}, 95 % interval {low:.1%} to {high:.1%}"),
        element("rect", x=axis.start, y=y - thickness / 2, width=end - axis.start, height=thickness, class_=kind),
        element("path", d=f"M{axis.at(low):.1f} {y:.1f}H{axis.at(high):.1f}", class_="interval"),
        marker(bar.run, end, y),
        element("text", f"{count.accuracy:.1%}{' !' if bar.marked else ''}", x=axis.at(high) + 5, y=y + 4),
    )
