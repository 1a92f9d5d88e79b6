"""What the sections of the page are made of: tables, figures, the names of runs."""

from collections.abc import Iterable, Sequence

from lit_cifar.html_report.markup import Child, Markup, element
from lit_cifar.html_report.svg import marker


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]]) -> Markup:
    """A table that scrolls in a container of its own; the first cell of a row is its name."""
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in rest))
        for first, *rest in rows
    ]
    columns = [element("th", cell, scope="col") for cell in head]
    content = element("table", element("thead", element("tr", *columns)), element("tbody", *body))
    return element("div", content, class_="scroll", tabindex=0)


def run_name(run: int, name: str) -> Markup:
    """A run's name behind its marker."""
    swatch = element("svg", marker(run, 6, 6), viewBox="0 0 12 12", class_="swatch", aria_hidden="true")
    return element("span", swatch, name, class_="run")


def stroke(name: str, *, dashed: bool) -> Markup:
    """What a solid or dashed line is, behind a piece of it."""
    line = element("path", d="M0 6H28", class_="line dashed" if dashed else "line")
    return element(
        "span", element("svg", line, viewBox="0 0 28 12", class_="dash", aria_hidden="true"), name, class_="run"
    )


def figures(*charts: tuple[str, str | None, Markup], legend: Sequence[Markup] = ()) -> Markup:
    """Charts beside one another, each with its title and a note, below a legend for all."""
    drawn = [
        element("figure", element("figcaption", title, None if note is None else element("small", note)), chart)
        for title, note, chart in charts
    ]
    keys = element("p", *legend, class_="legend") if legend else None
    return element("div", keys, element("div", *drawn, class_="charts"))
