"""Which part of the package may import which."""

import ast
from pathlib import Path

import pytest

import lit_cifar

PACKAGE = Path(lit_cifar.__file__).parent
# Each part may import the parts before it.
LAYERS = [
    {"errors", "layout"},
    {"launch"},
    {"models", "watchdog"},
    {"data", "metrics", "optim"},
    {"reporting"},
    {"checkpoint", "sample_audit"},
    {"module"},
    {"strategies"},
    {"callbacks", "modes"},
    {"verify"},
    {"chaos"},
    {"commands"},
    {"cli_help"},
    {"usage_errors"},
    {"cli"},
]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("lit_cifar.")} & set().union(*LAYERS)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_parts_import_only_what_lies_below_them(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    level = next(i for i, layer in enumerate(LAYERS) if part in layer)
    allowed = set().union(*LAYERS[:level]) | {part}
    assert imported_parts(path) <= allowed
