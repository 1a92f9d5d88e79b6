"""The code of a script, or of a notebook's cells without their magics."""

import json
import linecache
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType

from lit_cifar.errors import ConfigError

SUFFIX = ".ipynb"
_PYTHON = ("%%time", "%%capture", "%%prun")  # cells that begin so are Python all the same


def code_of(script: Path) -> Iterator[CodeType]:
    """What to execute, one after another."""
    if script.suffix != SUFFIX:
        yield compile(script.read_bytes(), str(script), "exec")
        return
    for number, cell in enumerate(cells_of(script), start=1):
        name, source = f"{script}, cell {number}", _without_magics(cell)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for `inspect`
        yield compile(source, name, "exec")


def cells_of(notebook: Path) -> list[str]:
    """The code of its cells."""
    try:
        cells = json.loads(notebook.read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{notebook.name} is no notebook of format 4: {type(error).__name__}"
        raise ConfigError(problem, remedy="save it by Jupyter, or pass a script") from None


def _without_magics(cell: str) -> str:
    with suppress(SyntaxError):
        compile(cell, "cell", "exec")
        return cell
    if cell.startswith("%%") and not cell.startswith(_PYTHON):
        return ""
    lines = [(line, line.lstrip()) for line in cell.splitlines()]
    # Each keeps its place, so that a block is never empty.
    return "\n".join(f"{line[: -len(own)]}pass" if own.startswith(("%", "!")) else line for line, own in lines)
