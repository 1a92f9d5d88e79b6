"""What a run has logged, compared with what it should have."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from torchmetrics import MeanMetric, Metric

from lit_cifar.tools.verify.rank_state import is_shared

Logged: TypeAlias = dict[tuple[str, int], float]  # by name and optimizer step, counted from 1
METRIC_BOUND = 1e-5  # metrics add up in float32, whatever the precision of the run is


def logged(run: Path) -> Logged:
    """The metrics of the whole run, learning rates and epochs, in the `metrics.csv` of a run folder."""
    path = run / "metrics.csv"
    if not path.exists():  # with --trainer.logger=false there is none
        return {}
    with path.open(newline="") as file:
        return {
            (name, int(row["step"]) + 1): float(value)  # the file counts from 0
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value and name != "step" and is_shared(name)
        }


def logged_problems(found: Logged, expected: Logged, *, bounds: Mapping[str, float], source: str) -> list[str]:
    """Where what a mode has logged is not what it should be, name by name and step by step.

    `bounds` say, by the beginning of a name, how far |found - expected| / max(1, |expected|) may go; other names are
    left out. `source` is where `expected` comes from, in words.
    """
    problems = []
    for name, step in sorted(found.keys() | expected.keys(), key=lambda key: (key[1], key[0])):
        bound = next((value for start, value in bounds.items() if name.startswith(start)), None)
        a, b = found.get((name, step)), expected.get((name, step))
        if bound is None or a == b:
            continue
        if a is None or b is None:
            problems.append(f"logged: {name} of step {step} is only in {source if a is None else 'the run'}")
        elif not abs(a - b) / max(1.0, abs(b)) <= bound:
            problems.append(f"logged: {name} of step {step} is {a:.6g}, {source} {b:.6g}")
    return problems


def counted(metrics: nn.Module) -> dict[str, int]:
    """How many samples each metric among `metrics` has counted in this process since it was reset."""
    found: dict[str, int] = {}
    for name, metric in metrics.named_modules():
        state: Any = metric.metric_state if isinstance(metric, Metric) else {}
        if isinstance(metric, MeanMetric):
            found[name] = round(float(state["weight"]))
        elif "confmat" in state:
            found[name] = int(state["confmat"].sum())
        elif "tp" in state:  # what is right, and what another class was taken for
            found[name] = int(state["tp"].sum() + state["fn"].sum())
    return found
