"""Compares the record of a mode with that of the single-device computation that it equals, or says why it cannot."""

import json
import math
from collections.abc import Sequence
from contextlib import suppress

import torch

from lit_cifar.checkpoint.files import DIGESTS
from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.modes import SizedMode
from lit_cifar.tools.replay.callback import RESULT
from lit_cifar.tools.replay.verdict import TAKEN, Finding
from lit_cifar.tools.verify.comparison import (
    LOGITS,
    METRIC_BOUND,
    SAME_BITS,
    Bounds,
    and_more,
    differences,
    first_excess,
    largest,
)
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.evaluation import Evaluated, expected, logits_problems
from lit_cifar.tools.verify.record import Record
from lit_cifar.tools.verify.reference import Reference
from lit_cifar.tools.verify.run_files import (
    MAY_DIFFER,
    OF_ACCUMULATION,
    OF_EVALUATION,
    OF_RESUME,
    checkpoint_problems,
    digest_problems,
    entry_problems,
    evaluation_file_problems,
    file_problems,
    logged,
    logged_problems,
)
from lit_cifar.tools.verify.runs import Outcome
from lit_cifar.tools.verify.verdict_table import VerifiedMode

ONE_DEVICE, SAME_WEIGHTS, FIRST_RUN = "one device", "one device with the same weights", "the undisturbed run"

RESUMED = "resumed"

RANDOM = (
    "not judged: the network draws random numbers in training, as dropout does, and with several parts of a batch it "
    "draws others than one device; pass --virtual_replicas=2 or more, with which all modes draw the same"
)

ROUNDING = (
    "not judged: it is further from one device than measured rounding, but not in float64, so this is rounding or a "
    "mistake of this precision alone; pass --virtual_replicas=2 or more, with which no bit may differ"
)


def judge(
    row: VerifiedMode, outcome: Outcome, record: Record, reference: Reference, settings: Configuration
) -> VerifiedMode:
    """Complete the mode's `row` by what its runs have left; it passes only if it was compared."""
    row.tolerance, row.seconds = dict(reference.bounds[-1]), outcome.seconds
    num_steps = len(reference.bounds)
    finished = record.resumed.folder.exists()
    if outcome.status != 0 and not finished:
        row.outcome = "crashed"
        row.problems.append(outcome.last_words)
        return row
    if record.steps != [*range(1, num_steps + 1)]:
        row.problems.append(f"the run ended after {len(record.steps)} of {num_steps} steps")
        row.outcome = "failed"
        return row
    row.processes = record.about["world_size"]
    of_steps = _compare_steps(row, record, reference)
    row.problems += [
        *of_steps,
        *replay_problems(record, settings.added_callbacks),
        *record.sample_problems(reference.record),
    ]
    if (reason := other_weights(reference.record, settings.added_callbacks)) is not None:
        row.outcome = "failed" if row.problems else "crashed" if outcome.status else "abstained"
        row.problems.append(f"{RESUMED}: {outcome.last_words}" if outcome.status else reason)
        return row
    row.problems += [*record.own_problems(), *record.count_problems(), *record.weight_problems()]
    of_metrics = _compare_metrics(row, record, reference, settings)
    row.problems += of_metrics
    _compare_rest(row, record, reference, settings)
    crashed = outcome.status != 0 and not row.problems
    row.problems += [f"{RESUMED}: {problem}" for problem in _resumed_problems(outcome, record, reference, settings)]
    row.outcome = "crashed" if crashed else "failed" if row.problems else "passed"
    rounded = {*of_steps, *of_metrics}
    row.may_be_rounding = not settings.is_exact and row.outcome == "failed" and rounded.issuperset(row.problems)
    return row


def replay_problems(record: Record, added_callbacks: Sequence[str] = ()) -> list[str]:
    """What a replay of the same steps, in the same precision, has found; nothing where the mode has none.

    Without callbacks of the user's nothing happens in `fit` that a replay has to take as it is. One that passes says
    nothing of the order of the data and their augmentation.
    """
    path = record.run / RESULT
    if not path.exists():
        return []
    reports = json.loads(path.read_text())
    findings = [str(Finding(**finding)) for report in reports for finding in report["findings"]]
    if not added_callbacks:
        findings += [note for report in reports for note in report["notes"] if note.endswith(TAKEN)]
    return [f"replay: {findings[0]}" + and_more(len(findings) - 1)] if findings else []


def _compare_metrics(row: VerifiedMode, record: Record, reference: Reference, settings: Configuration) -> list[str]:
    """What is logged and evaluated, beyond its bounds."""
    bounds = _bounds_of_metrics(reference, settings)
    wanted = logged(reference.record.run)
    problems = logged_problems(logged(record.run), wanted, bounds=bounds, source=f"{ONE_DEVICE} has")
    for number in record.steps:
        if evaluated := record.evaluated(number):
            problems += _compare_evaluation(row, number, evaluated, record, reference, settings)
    return problems


def _compare_rest(row: VerifiedMode, record: Record, reference: Reference, settings: Configuration) -> None:
    """Files and checkpoints, which rounding does not touch."""
    alone = reference.record
    if (last := record.evaluated(max(record.steps))) and logged(alone.run):
        row.problems += evaluation_file_problems(record, last, in_chunks=settings.num_parts is None)
    row.problems += checkpoint_problems(record, settings.plain_module, config=settings.config)
    row.problems += entry_problems(
        record,
        alone,
        bound=0.0 if settings.num_parts is not None else METRIC_BOUND if settings.is_exact else math.inf,
        source=ONE_DEVICE,
        leave_out=[*MAY_DIFFER, *(OF_ACCUMULATION if settings.accumulation > 1 else [])],
    )
    row.problems += file_problems(record, alone, source=ONE_DEVICE, leave_out=(*OF_EVALUATION, DIGESTS))
    row.problems += digest_problems(record, alone, settings.plain_module.network)


def _compare_steps(row: VerifiedMode, record: Record, reference: Reference) -> list[str]:
    """The first tensor of each step beyond its bound."""
    problems = []
    for number, bounds in enumerate(reference.bounds, 1):
        step, wanted = record.step(number), reference.record.step(number)
        row.losses.append(float(step["loss"]["loss"]))
        row.expected_losses.append(float(wanted["loss"]["loss"]))
        found = differences(step, wanted)
        for kind, value in largest(found).items():
            if kind in bounds:
                row.differences[kind] = max(row.differences.get(kind, 0.0), value)
        excess = first_excess(found, bounds, step=number)
        problems += [] if excess is None else [str(excess)]
    return problems


def _compare_evaluation(
    row: VerifiedMode,
    number: int,
    evaluated: dict[int, Evaluated],
    record: Record,
    reference: Reference,
    settings: Configuration,
) -> list[str]:
    """With one device that has the same weights."""
    when = f"evaluation after step {number}"
    problems = []
    if settings.num_parts is None:
        alone = expected(record.step(number), config=settings.config)
        own = {key: value for key, value in logged(record.run).items() if key[0] in alone.metrics and key[1] == number}
        wanted = {key: alone.metrics[key[0]] for key in own}
        problems += logged_problems(own, wanted, bounds=alone.bounds, source=f"{SAME_WEIGHTS} has")
        samples, bound = alone.evaluated, alone.bounds[LOGITS]
    else:  # the bits of the one device itself
        (samples,), bound = reference.record.evaluated(number).values(), 0.0
    for process, its in evaluated.items():
        gaps = its.gaps(samples)
        problems += logits_problems(when, process, gaps, bound=bound)
        row.differences[LOGITS] = max([row.differences.get(LOGITS, 0.0), *(gap for _, gap in gaps)])
    row.tolerance[LOGITS] = max(row.tolerance.get(LOGITS, 0.0), bound)
    if number == max(record.steps):
        counts = [its.counts for its in record.first_of_ranks(evaluated).values()]
        row.counts = (sum(right for right, _ in counts), sum(seen for _, seen in counts))
    return problems


def _resumed_problems(outcome: Outcome, record: Record, reference: Reference, settings: Configuration) -> list[str]:
    """Where the process that has made the last step once more has not done what the first one did: bits on the CPU."""
    last, resumed = max(record.steps), record.resumed
    if outcome.status != 0:
        return [outcome.last_words]
    if resumed.steps != [last]:
        return [f"it has made the steps {resumed.steps}, not {last} alone"]
    same_bits = settings.config["trainer"]["accelerator"] == "cpu"
    bounds = {"loss": 0.0} | SAME_BITS if same_bits else reference.bounds[-1]
    excess = first_excess(differences(resumed.step(last), record.step(last)), bounds, step=last)
    problems = ([] if excess is None else [str(excess)]) + resumed.own_problems()
    if same_bits:
        everything = dict.fromkeys(("train/", "val/", "lr-", "epoch"), 0.0)
        wanted = logged(record.run)
        problems += logged_problems(logged(resumed.run), wanted, bounds=everything, source=f"{FIRST_RUN} has")
        problems += entry_problems(resumed, record, bound=0.0, source=FIRST_RUN, leave_out=OF_RESUME)
        problems += file_problems(resumed, record, source=FIRST_RUN)
    return problems


def _bounds_of_metrics(reference: Reference, settings: Configuration) -> Bounds:
    """By the beginnings of their names."""
    if settings.num_parts is not None:
        return {"train/": 0.0, "val/": 0.0, "lr-": 0.0, "epoch": 0.0}
    # Rounding may turn two answers, in bfloat16 any number.
    turned = {"64-true": METRIC_BOUND, "32-true": 2 / settings.batch_size, "bf16-mixed": math.inf}
    return {
        "train/loss": reference.bounds[-1]["loss"] + METRIC_BOUND,
        "train/acc": turned[settings.precision],
        "val/": math.inf,  # that they are there; the evaluation compares their values with those of the same weights
        "lr-": 0.0,
        "epoch": 0.0,
    }


# Why a mode cannot be judged, though nothing need be wrong with it ---------------------------------------------------


def other_weights(alone: Record, added_callbacks: Sequence[str]) -> str | None:
    """Why evaluations and checkpoints cannot be judged by the steps of a run; None if they can.

    With a callback that averages weights, as EMA does, one device itself evaluates or saves others than it trains.
    Without any callback of the user's, that would be a mistake.
    """
    problems = alone.own_problems() if added_callbacks else []
    if not problems:
        return None
    return (
        f"not judged beyond its steps: with {', '.join(added_callbacks)} one device itself evaluates or saves other "
        f"weights than those of its steps ({problems[0]}); leave the callback out to have the rest judged"
    )


@torch.no_grad()
def draws_random_numbers(module: LitResNet) -> bool:
    """Whether a pass in training advances torch's generator: dropout does, and so does any code that samples."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        with suppress(Exception):  # of the user's own code; `fit` says in words what is wrong
            module.network.train()(torch.zeros(4, *module.image_shape))
        return not torch.equal(before, torch.get_rng_state())


def masks_of_one_device(mode: SizedMode, *, accumulation: int) -> bool:
    """Whether one process passes a batch as a whole, so that it draws what one device does."""
    return mode.num_processes == 1 and mode.batch_split().ghost_batches(accumulation=accumulation) == GhostBatches()
