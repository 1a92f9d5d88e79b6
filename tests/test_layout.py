"""The layout of strategies that have not started, and the rule of which package may import which."""

import ast
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest

import lit_cifar
from lit_cifar.layout import Layout

PACKAGE = Path(lit_cifar.__file__).parent
# Each part may import the parts before it.
LAYERS = [
    {"errors", "layout", "accuracy"},
    {"data", "models", "schedules", "checkpoints"},
    {"module"},
    {"strategies", "callbacks", "run_folder", "analysis"},
    {"commands"},
    {"cli"},
]


@pytest.mark.parametrize(
    ("trainer", "layout"),
    [
        ({"devices": 1}, Layout()),
        ({"devices": 2, "strategy": "ddp"}, Layout(num_shards=2)),
        ({"devices": 4, "strategy": "ddp_spawn"}, Layout(num_shards=4)),
        ({"devices": 2, "strategy": "ddp", "num_nodes": 3}, Layout(num_shards=6)),
        ({"devices": 2, "strategy": "dp"}, Layout(replicas_per_shard=2)),
    ],
)
def test_layout_is_known_before_processes_start(trainer: dict[str, object], layout: Layout) -> None:
    strategy = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **trainer).strategy
    assert Layout.of(strategy) == layout


def test_replicas_multiply() -> None:
    assert Layout(num_shards=3, shard=2, replicas_per_shard=2).num_replicas == 6
    assert Layout.of(SimpleNamespace()).num_replicas == 1


@pytest.mark.parametrize(
    "fields", [{"num_shards": 0}, {"num_shards": 2, "shard": 2}, {"shard": -1}, {"replicas_per_shard": 0}]
)
def test_impossible_layouts_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        Layout(**fields)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("lit_cifar.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_parts_import_only_what_lies_below_them(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    level = next(i for i, layer in enumerate(LAYERS) if part in layer)
    allowed = set().union(*LAYERS[:level]) | {part}
    assert imported_parts(path) <= allowed
