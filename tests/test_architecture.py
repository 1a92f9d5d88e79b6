"""Which part of the package may import which, and the walks through the code that docs/architecture.md lists."""

import ast
import re
import signal
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from call_trace import traced
from commands import TINY, callback, launch, mode_flags, run_here
from data_files import write_binary_edition

import lit_cifar
from lit_cifar.data import cifar10
from tests.mutations.self_test import ARGS as VERIFIED

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


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


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
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py")}
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


def walk(title: str) -> list[tuple[str, str]]:
    """The files and functions that the page lists below a heading."""
    section = PAGE.read_text().split(f"### {title}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)` `(\w+)`", section, flags=re.M)


def tracing(folder: Path) -> list[str]:
    """Flags that trace a run's processes too."""
    return callback("call_trace.CallTrace", file=folder / "calls")


def assert_in_order(title: str, calls: Path) -> None:
    """The functions of a walk were called, each for the first time after the one before it."""
    called = [tuple(line.split()) for line in calls.read_text().splitlines()]
    steps = walk(title)
    assert steps
    missing = [step for step in steps if step not in called]
    assert missing == []
    assert steps == sorted(steps, key=called.index)


def test_an_image_from_the_disk_to_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "NUM_IMAGES", {"train": 100, "test": 20})
    write_binary_edition(tmp_path, records_per_file=20)
    flags = ["--data.dataset=cifar10", f"--data.root={tmp_path}", "--trainer.num_sanity_val_steps=0"]
    with traced(tmp_path / "calls"):
        run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}")
    assert_in_order("An image, from the disk to the loss", tmp_path / "calls")


@pytest.mark.usefixtures("one_process")
def test_a_strategy_to_the_first_optimizer_step(tmp_path: Path) -> None:
    """In one process that holds two stages: the same calls as in two processes with one each."""
    flags = mode_flags("PipelineStrategy", 1, schedule="Interleaved1F1B", num_microbatches=2)
    flags += ["--trainer.max_steps=1", "--trainer.num_sanity_val_steps=0", f"--run_dir={tmp_path / 'run'}"]
    with traced(tmp_path / "calls"):
        run_here("fit", *TINY, *flags)
    assert_in_order("`--trainer.strategy=pp`, to the first optimizer step", tmp_path / "calls")


@pytest.mark.filterwarnings("ignore:the training before had")
def test_a_checkpoint_written_and_resumed(tmp_path: Path) -> None:
    flags = [*TINY, "--last_checkpoint.every_n_steps=2", f"--run_dir={tmp_path / 'run'}"]
    with traced(tmp_path / "writes"):
        run_here("fit", *flags, "--trainer.max_steps=3")
    with traced(tmp_path / "resumes"):
        run_here("fit", *flags, "--resume=auto")
    assert_in_order("A checkpoint, written in the middle of an epoch", tmp_path / "writes")
    assert_in_order("A run that resumes from it", tmp_path / "resumes")


@pytest.mark.slow
def test_a_rank_that_dies(tmp_path: Path) -> None:
    killed = callback("stopping.SignalAfter", step=2, rank=1, number=int(signal.SIGKILL))
    launch("fit", *TINY, *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}", *killed, *tracing(tmp_path), check=False)
    assert_in_order("A rank that dies", tmp_path / "calls")


@pytest.mark.slow
def test_a_row_of_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with traced(tmp_path / "calls"):
        run_here("verify", "--modes=ddp", "--steps=2", *VERIFIED, *tracing(tmp_path))
    assert_in_order("A row of `tools/verify`", tmp_path / "calls")
