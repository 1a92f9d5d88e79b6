"""Compares the record of a mode with that of the single-device computation that it equals."""

import math

from lit_cifar.verify.checkpoint_check import checkpoint_problems, evaluation_problems
from lit_cifar.verify.comparison import Bounds, differences, first_excess, largest
from lit_cifar.verify.configuration import Configuration
from lit_cifar.verify.logged_metrics import METRIC_BOUND, logged_problems
from lit_cifar.verify.record import Record
from lit_cifar.verify.reference import Reference
from lit_cifar.verify.runs import Outcome
from lit_cifar.verify.verdict_table import VerifiedMode


def judge(
    row: VerifiedMode, outcome: Outcome, record: Record, reference: Reference, settings: Configuration
) -> VerifiedMode:
    """Complete the mode's `row` by what its run has left."""
    row.tolerance, row.seconds = reference.bounds[-1], outcome.seconds
    num_steps = len(reference.bounds)
    if outcome.status != 0:
        row.problems.append(outcome.last_words)
    elif record.num_steps < num_steps:
        row.problems.append(f"the run ended after {record.num_steps} of {num_steps} steps")
    else:
        _compare(row, record, reference, settings)
    return row


def _compare(row: VerifiedMode, record: Record, reference: Reference, settings: Configuration) -> None:
    row.processes = record.about["world_size"]
    _compare_steps(row, record, reference)
    last_step = record.step(len(reference.bounds))
    row.problems += record.sample_problems(reference.record)
    row.problems += record.own_problems()
    row.problems += checkpoint_problems(record.checkpoint, last_step, config=settings.config)
    row.problems += record.count_problems()
    row.problems += logged_problems(
        record.logged, reference.record.logged, bounds=_bounds_of_metrics(reference, settings), source="one device has"
    )
    if settings.evaluates:  # as one device with the same weights does
        row.counts = record.counts
        row.problems += evaluation_problems(
            record.checkpoint, counts=row.counts, found=record.logged, config=settings.config
        )


def _compare_steps(row: VerifiedMode, record: Record, reference: Reference) -> None:
    for number, bounds in enumerate(reference.bounds, 1):
        step, expected = record.step(number), reference.record.step(number)
        row.losses.append(float(step["loss"]))
        row.expected_losses.append(float(expected["loss"]))
        found = differences(step, expected)
        for kind, value in largest(found).items():
            if kind in bounds:
                row.differences[kind] = max(row.differences.get(kind, 0.0), value)
        excess = first_excess(found, bounds, step=number)
        if excess is not None and not row.problems:
            row.problems.append(str(excess))


def _bounds_of_metrics(reference: Reference, settings: Configuration) -> Bounds:
    """By the beginnings of their names."""
    if settings.num_parts is not None:
        return {"train/": 0.0, "val/": 0.0, "lr-": 0.0}
    # Rounding may turn two answers, in bfloat16 any number.
    turned = {"64-true": METRIC_BOUND, "32-true": 2 / settings.batch_size, "bf16-mixed": math.inf}
    return {
        "train/loss": reference.bounds[-1]["loss"] + METRIC_BOUND,
        "train/acc": turned[settings.precision],
        "val/": math.inf,  # that they are there; the evaluation compares their values with those of the same weights
        "lr-": 0.0,
    }
