"""A confusion matrix."""

from collections.abc import Sequence

from lit_cifar.html_report.markup import Markup, element
from lit_cifar.html_report.svg import WIDTH, label, label_space, picture

_DIGIT = 6.0  # width of one in a cell
_DARK = 0.7  # a cell on which black would be hard to read


def matrix_chart(names: Sequence[str], rows: Sequence[Sequence[int]], *, totals: Sequence[int], title: str) -> Markup:
    """Draw counts in cells. Right ones are on the diagonal; the others are as strong as they are frequent.

    Args:
        names: Of the classes.
        rows: A row for each true class, a column for each predicted one.
        totals: Images of each true class.
        title: What a screen reader says.
    """
    left = 12 + label_space(["true", *names])
    side = (WIDTH - left - 0.65 * label_space(names)) / len(names)  # the last names rise beyond the matrix
    top = 26 + 0.8 * label_space(names)
    shares = [[count / (total or 1) for count in row] for row, total in zip(rows, totals, strict=True)]
    worst = max((share for i, row in enumerate(shares) for j, share in enumerate(row) if i != j), default=0) or 1
    drawn = [
        element("text", "true", x=left - 6, y=top - 6, class_="axis end"),
        element("text", "predicted", x=WIDTH - 6, y=10, class_="axis end"),
    ]
    for i, name in enumerate(names):
        drawn.append(label(name, left - 6, top + (i + 0.5) * side + 4))
        drawn.append(label(name, left + (i + 0.5) * side + 3, top - 6, turned=True))
        for j, count in enumerate(rows[i]):
            strength = shares[i][j] if i == j else shares[i][j] / worst
            tip = f"{name}, taken for {names[j]}: {count:,} of {totals[i]:,}, {shares[i][j]:.1%}"
            kind = "right" if i == j else "wrong"
            drawn.append(_cell(count, left + j * side, top + i * side, side, kind=kind, strength=strength, tip=tip))
    return picture(drawn, height=top + side * len(names) + 4, title=title)


def _cell(count: int, x: float, y: float, side: float, *, kind: str, strength: float, tip: str) -> Markup:
    """A square with its count, where that fits."""
    number = None
    if side >= _DIGIT * len(str(count)) + 3:
        shade = " on-dark" if strength > _DARK else "" if count else " zero"
        number = element("text", str(count), x=x + side / 2, y=y + side / 2 + 4, class_=f"cell{shade}")
    return element(
        "g",
        element("title", tip),
        element("rect", x=x, y=y, width=side, height=side, class_="grid"),
        element("rect", x=x + 0.5, y=y + 0.5, width=side - 1, height=side - 1, fill_opacity=strength, class_=kind),
        number,
    )
