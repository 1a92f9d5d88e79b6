"""Which part of the package may import which, and the walks through the code that docs/architecture.md lists."""

import ast
import re
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lit_cifar

PACKAGE = Path(lit_cifar.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
# Each part may import the parts before it.
LAYERS = [
    {"errors", "version"},
    {"configured", "internals"},
    {"mode"},
    {"launch"},
    {"data", "checks.watchdog", "checks.tensors", "checks.verdict"},
    {"checks.compare"},
    {"checks.replica_audit", "checks.relations"},
    {"models"},
    {"reporting"},
    {"checkpoint"},
    {"task"},
    {"strategies"},
    {"tools.modes", "tools.terminal"},
    {"tools.relations", "tools.verify"},
    {"tools.doctor", "tools.ray"},
    {"cli"},
]


def part_named(parts: Sequence[str]) -> str:
    """A room, or one of those of the checks and the tools."""
    return ".".join(parts[:2]) if parts[0] in ("checks", "tools") else parts[0]


def named_in_strings(path: Path) -> set[str]:
    """What strings call modules of this package, such as "data.pictures", with {} for what they fill in."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = []
    for node in nodes:
        if node in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return {name.strip(".") for text in texts for name in re.findall(r"\blit_cifar\.([\w.{}]*[\w}])", text)}


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_parts_import_only_what_lies_below_them(path: Path) -> None:
    part = part_named(path.relative_to(PACKAGE).with_suffix("").parts)
    if part in ("__init__", "__main__", "checks.__init__", "tools.__init__"):
        return
    level = next(i for i, layer in enumerate(LAYERS) if part in layer)
    allowed = set().union(*LAYERS[:level]) | {part}
    own = [name.removeprefix("lit_cifar.") for name in imported_names(path) if name.startswith("lit_cifar.")]
    named = {part_named(name.split(".")) for name in (*own, *named_in_strings(path))}
    assert named & {*set().union(*LAYERS), "{}"} <= allowed


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Not in functions either, nor for types alone."""
    files = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for path, name in files.items()}
    names = {module: imported_names(path) for module, path in paths.items()}
    known = {
        module: {name if name in paths else name.rpartition(".")[0] for name in found} & paths.keys()
        for module, found in names.items()
    }
    TopologicalSorter(known).prepare()  # raises a CycleError that says the circle


def test_the_package_needs_neither_pandas_nor_its_mutations() -> None:
    """The first is an extra, and every command belongs to the plain installation."""
    roots = {name.split(".")[0] for path in PACKAGE.rglob("*.py") for name in imported_names(path)}
    assert not {"pandas", "tests"} & roots


def test_a_walk_names_functions_that_are_there() -> None:
    steps = re.findall(r"^\d+\. `([\w/]+\.py)` `(\w+)`", PAGE.read_text(), flags=re.M)
    assert len(steps) >= 60
    assert [step for step in steps if f"def {step[1]}(" not in (PACKAGE / step[0]).read_text()] == []
