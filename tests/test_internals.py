"""Names inside torch and Lightning: each is looked up, and what is missing is said in a line."""

import ast
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch.loops.training_epoch_loop as epoch_loops
import lightning.pytorch.overrides.distributed as overrides
import pytest
import torch.distributed as dist
from commands import TINY, mode_flags, refused
from torch import nn

import lit_cifar
from lit_cifar import Watchdog, internals
from lit_cifar.checks.replica_audit.replicas import why_not_compared
from lit_cifar.errors import ConfigError
from lit_cifar.tools.doctor import missing_names

PACKAGE = Path(lit_cifar.__file__).parent
LEAVES = {name for _, name, _ in internals.each()}
# What neither torch nor Lightning has, or what they document.
OTHERS = {
    **dict.fromkeys(["_abc_impl", "_current_frames", "_exit", "_getframe", "_is_protocol"], "Python's"),
    **dict.fromkeys(
        ["_parent_process", "_run_exitfuncs", "_forkserver", "_forkserver_alive_fd"], "Python's, in a fork"
    ),
    **dict.fromkeys(["_actions", "_choices_actions", "_option_string_actions", "_HelpAction"], "argparse's"),
    "_replace": "a NamedTuple's, documented",
    "_backward_cls": "made by torch for each autograd.Function",
}


def test_all_names_are_there() -> None:
    assert [str(error) for error in internals.missing()] == []
    assert [*missing_names()] == []


def test_a_function_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode is refused before the first step; under another name than this it has nobody to ask."""
    monkeypatch.delattr(overrides, "_sync_module_states")
    monkeypatch.delitem(vars(internals), "sync_module_states", raising=False)
    said = "has no lightning.pytorch.overrides.distributed._sync_module_states, which every mode of lit_cifar needs"
    refused("fit", *TINY, *mode_flags("fsdp2", 1), says=[said, "pip install torch=="])
    with pytest.raises(ConfigError, match=said):
        _ = internals.sync_module_states
    (fault,) = missing_names()
    assert "fsdp2" in fault.modes
    assert "ddp" not in fault.modes


def test_an_attribute_of_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is assigned here, and nobody would read it."""
    monkeypatch.setattr(epoch_loops, "_TrainingEpochLoop", renamed(epoch_loops._TrainingEpochLoop))
    said = "_TrainingEpochLoop._batches_that_stepped, which every run needs"
    refused("fit", *TINY, f"--run_dir={tmp_path / 'run'}", says=[said])
    (fault,) = missing_names()
    assert {"single", "ddp"} <= {*fault.modes}


def renamed(kind: type[Any]) -> Any:
    """The class from its source, in which that attribute has another name."""
    source = textwrap.dedent(inspect.getsource(kind)).replace("_batches_that_stepped", "_num_stepped")
    scope = dict(vars(sys.modules[kind.__module__]))
    exec(source, scope)
    return scope[kind.__name__]


def test_the_watchdog_says_that_it_does_not_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    trainer: Any = SimpleNamespace(world_size=2)
    with pytest.warns(UserWarning, match="not watched: lightning .* has no .*_ChildProcessObserver"):
        Watchdog().setup(trainer, trainer, "fit")


def test_replicas_are_not_compared_where_a_hook_could_not_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.parallel.DistributedDataParallel", nn.Module)
    trainer: Any = None
    assert "has no torch.nn.parallel.DistributedDataParallel._comm_hooks" in why_not_compared(trainer)


def trees() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Names that the package defines: functions, classes, variables, and attributes of `self`."""
    nodes = [node for _, tree in trees() for node in ast.walk(tree)]
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return found | {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def foreign(node: ast.AST) -> list[str]:
    """Private names of others that this node speaks of."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lit_cifar"):
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "patch.object")
    return [its.value for its in node.args[1:2] if isinstance(its, ast.Constant)] if asks else []  # type: ignore[attr-defined]


def private_names() -> Iterator[tuple[str, str, ast.AST]]:
    """The file, the name and the node of each."""
    for path, tree in trees():
        for node in ast.walk(tree):
            yield from ((path, name, node) for name in foreign(node) if is_private(name))


def test_no_private_name_is_used_that_is_not_looked_up() -> None:
    known = LEAVES | {*OTHERS} | own_names()
    assert len([*private_names()]) > 100
    assert [(path, name) for path, name, _ in private_names() if name not in known] == []


def test_no_private_name_is_imported_elsewhere() -> None:
    imports = [found for found in private_names() if isinstance(found[2], ast.Import | ast.ImportFrom)]
    assert [(path, name) for path, name, _ in imports if name not in OTHERS] == []


def test_no_private_method_is_overridden_that_is_not_looked_up() -> None:
    """Under another name nobody would call it."""
    names = (module.name for module in pkgutil.walk_packages(lit_cifar.__path__, "lit_cifar."))
    found = set()
    # The fork server's import blocks a signal in the process that imports it.
    for module in (importlib.import_module(name) for name in names if not name.endswith(("__main__", "fork_server"))):
        for kind in filter(inspect.isclass, vars(module).values()):
            bases = [base for base in kind.__mro__[1:] if base.__module__.split(".")[0] in ("torch", "lightning")]
            if kind.__module__ == module.__name__:
                found |= {(kind.__name__, name) for name in vars(kind) for base in bases if name in vars(base)}
    assert [its for its in sorted(found) if is_private(its[1]) and its[1] not in LEAVES | {*OTHERS}] == []
