"""Checkpoints for tests: some that say in every number which step they are of; and two, compared number by number."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from lit_cifar.checkpoint.format import read_checkpoint


def state(step: int) -> dict[str, Any]:
    """Its content."""
    return {"global_step": step, "optimizer_states": [], "weights": torch.full((10_000,), float(step)), "name": "tiny"}


def step_of(path: Path) -> int:
    """The step of a file with a `state`, if all of it is of one."""
    checkpoint = read_checkpoint(path)
    step = int(checkpoint["global_step"])
    assert checkpoint["weights"].eq(step).all()
    return step


def assert_same_checkpoint(found: dict[str, Any], expected: dict[str, Any], *, tolerance: float) -> None:
    """Parameters, buffers and the whole optimizer state, by the same keys."""
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=tolerance, atol=tolerance, msg=name)
    mine, theirs = found["optimizer_states"][0], expected["optimizer_states"][0]
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        torch.testing.assert_close(mine["state"][index], entry, rtol=tolerance, atol=tolerance)


@contextmanager
def before_each_line(*modules: ModuleType, look: Callable[[], None]) -> Iterator[None]:
    """Call `look` before each line of `modules` that this thread runs, which may be the last before a kill."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in [module.__file__ for module in modules]:
            return None
        if event == "line":
            sys.settrace(None)
            look()
            sys.settrace(trace)
        return trace

    before = sys.gettrace()  # of a debugger, or a measurement of coverage
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
