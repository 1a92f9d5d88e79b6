"""Compares where two runs have come."""

import csv
from pathlib import Path

import torch

from gpu_visit.step import FailedError
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.tools.verify.record import EXACT_BOUND, KINDS, LOSS, gaps_of_step, note_largest, step_problems
from lit_cifar.tools.verify.recorder import BUFFERS, OPTIMIZER, PARAMETERS, Step

_LOSSES = ("train/loss", "val/loss")  # of all samples of an epoch; that of a step is of this process alone


def agreement(found: Path, expected: Path) -> tuple[str, dict[str, float]]:
    """How far the run folder `found` is from the other, and its largest difference of each kind.

    Raises:
        FailedError: Further than rounding in float64.
    """
    gaps, largest = gaps_of_step(_end(found), _end(expected)), dict[str, float]()
    note_largest(largest, gaps)
    last = read_checkpoint(last_checkpoint(expected))["global_step"]
    worst = ", ".join(f"{kind} {value:.1e}" for kind, value in largest.items())
    if problems := step_problems(gaps, dict.fromkeys(KINDS, EXACT_BOUND), step=last):
        raise FailedError(f"{''.join(problems)} (largest: {worst})")
    return f"off by {worst}", largest


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def logged(run: Path, column: str) -> dict[int, float]:
    """What a run has logged, by step."""
    with (run / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): float(row[column]) for row in csv.DictReader(file) if row.get(column)}


def _end(run: Path) -> Step:
    """The last losses and the last checkpoint, by kind and name, as `gaps_of_step` takes them."""
    checkpoint = read_checkpoint(last_checkpoint(run))
    state = checkpoint["state_dict"]
    buffers = [name for name in state if "running_" in name or "num_batches" in name]
    of_parameters = checkpoint["optimizer_states"][0]["state"].items()
    of_optimizer = [(f"{number} {name}", value) for number, own in of_parameters for name, value in own.items()]
    losses = {name: [*logged(run, name).values()][-1] for name in _LOSSES}
    return {
        **{(LOSS, name): torch.tensor(loss, dtype=torch.float64) for name, loss in losses.items()},
        **{(BUFFERS if name in buffers else PARAMETERS, name): value for name, value in state.items()},
        **{(OPTIMIZER, name): value for name, value in of_optimizer if isinstance(value, torch.Tensor)},
    }
