"""HTML and SVG elements; text is escaped wherever it does not come from here."""

from html import escape
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already; only the functions of this module make it from anything else."""


Child: TypeAlias = "Markup | str | None"


def element(name: str, *children: Child, **attributes: object) -> Markup:
    """`<name attributes>children</name>`; a child that is None is left out.

    Args:
        name: Of the element.
        *children: Its content; a plain `str` is escaped.
        **attributes: An underscore stands for a hyphen and a last one is dropped: `class_`, `stroke_width`. One that is
            None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """The children one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child))


def _text(value: object) -> str:
    """An attribute's value; lengths are rounded, as a hundredth of a pixel cannot be seen."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
