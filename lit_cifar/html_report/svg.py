"""What all charts are drawn with: markers, labels, axes, the picture. Colours are classes of the page's style sheet.

A picture is 360 units wide: about a pixel each on a phone, where its text must be readable.
"""

from collections.abc import Callable, Sequence

from lit_cifar.html_report.axes import Axis
from lit_cifar.html_report.markup import Markup, element, joined

WIDTH = 360
CHARACTER = 6.2  # width of one of the labels, on average
_NUM_COLORS = 8  # in the style sheet
_LONGEST = 16  # characters of a label
_MARKERS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",  # circle
    "M-3.2-3.2h6.4v6.4h-6.4z",  # square
    "M0-4.4L4.2 3.2h-8.4z",  # triangle
    "M0-4.6L4.6 0L0 4.6L-4.6 0z",  # diamond
    "M0 4.4L4.2-3.2h-8.4z",  # triangle that points down
)


def color(run: int) -> str:
    """The class that gives the run at this place in the list its color."""
    return f"color{run % _NUM_COLORS}"


def marker(run: int, x: float, y: float, *, title: str | None = None) -> Markup:
    """The marker of a run at a place; `title` is shown when the mouse is on it."""
    tip = None if title is None else element("title", title)
    shape = _MARKERS[run % len(_MARKERS)]
    return element("path", tip, d=shape, transform=f"translate({x:.1f} {y:.1f})", class_=f"marker {color(run)}")


def picture(drawn: Sequence[Markup], *, height: float, title: str) -> Markup:
    """The chart; `title` is what a screen reader says."""
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=title)


def label_space(names: Sequence[str]) -> float:
    """The width that `label` needs for the longest of these."""
    return CHARACTER * min(_LONGEST, max(map(len, names)))


def label(name: str, x: float, y: float, *, turned: bool = False) -> Markup:
    """A name that ends at x, or begins there and rises; of a long one the beginning, with the whole as a tooltip."""
    short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"
    tip = None if short == name else element("title", name)
    if turned:
        return element("text", tip, short, transform=f"translate({x:.1f} {y:.1f}) rotate(-50)")
    return element("text", tip, short, x=x, y=y, class_="end")


def horizontal(axis: Axis, top: float, bottom: float, *, name: str, text: Callable[[float], str]) -> Markup:
    """Lines from top to bottom at the ticks, their values and the axis's name below."""
    lines = "".join(f"M{axis.at(tick):.1f} {top:.1f}V{bottom:.1f}" for tick in axis.ticks)
    values = [element("text", text(tick), x=axis.at(tick), y=bottom + 15, class_="middle") for tick in axis.ticks]
    title = element("text", name, x=(axis.start + axis.end) / 2, y=bottom + 33, class_="axis middle")
    return joined(element("path", d=lines, class_="grid"), *values, title)


def vertical(axis: Axis, left: float, right: float, *, name: str, text: Callable[[float], str]) -> Markup:
    """Lines from left to right at the ticks, their values beside them, the axis's name above."""
    lines = "".join(f"M{left:.1f} {axis.at(tick):.1f}H{right:.1f}" for tick in axis.ticks)
    values = [element("text", text(tick), x=left - 6, y=axis.at(tick) + 4, class_="end") for tick in axis.ticks]
    return joined(element("path", d=lines, class_="grid"), *values, element("text", name, x=2, y=12, class_="axis"))
