"""Judges a mode, also resumed, by comparing what its runs write with the single-device computation that it equals."""

import csv
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.checkpoint.atomic import BEST
from lit_cifar.checkpoint.compatibility import check_header
from lit_cifar.checkpoint.files import DIGESTS, weights_digest
from lit_cifar.checkpoint.format import POSITION, read_checkpoint
from lit_cifar.configured import made
from lit_cifar.errors import CheckpointError
from lit_cifar.reporting.evaluation_tables import CONFUSION, PER_RANK
from lit_cifar.tools.verify.launcher import Configuration, evaluated_alone
from lit_cifar.tools.verify.record import (
    EXACT_BOUND,
    LOGITS,
    METRIC_BOUND,
    METRICS,
    SAME_BITS,
    Bounds,
    Evaluated,
    Logged,
    Record,
    Step,
    difference,
    differences,
    first,
    largest,
    step_problems,
)
from lit_cifar.tools.verify.recorder import BUFFERS, PARAMETERS, filled, held, kinds
from lit_cifar.tools.verify.runs import Outcome

ONE_DEVICE, SAME_WEIGHTS, FIRST_RUN = "one device", "one device with the same weights", "the undisturbed run"
RESUMED = "resumed"
_SAME_METRICS = dict.fromkeys(("train/", "val/", "lr-", "epoch"), 0.0)  # bounds by the beginnings of their names

# Entries of a checkpoint that need not be those of the one device, and why.
MAY_DIFFER = {
    "state_dict": "each checkpoint's is compared with the steps of its own run",
    "optimizer_states": "likewise",
    "epoch_loop.val_loop.batch_progress": "depends on the number of processes, and nothing reads it",
}
OF_ACCUMULATION = {"loops": "Lightning counts the batches of the loader, and an accumulated step has several"}
OF_RESUME = {
    "current_score": "Lightning forgets the last score of the best checkpoint, and nothing reads it",
    "epoch_loop.val_loop.batch_progress": "a resumed run counts them from 0",
}

# "failed": compared, and wrong. "abstained": it could not be judged. "crashed": its run ended by an error.
Verdict: TypeAlias = Literal["passed", "failed", "abstained", "crashed"]


@dataclass
class VerifiedMode:
    mode: str
    equals: str  # the single-device computation that it was compared with
    processes: int | None = None  # number of processes; None if the run failed before that was known
    nodes: int | None = None  # number of nodes on which they ran, counted by a launcher
    losses: list[float] = field(default_factory=list)  # the loss of the global batch, step by step
    expected_losses: list[float] = field(default_factory=list)  # losses of the single-device computation
    differences: Bounds = field(default_factory=dict)  # the largest difference of each kind over all steps
    tolerance: Bounds = field(default_factory=dict)  # bound of each kind
    counts: tuple[int, int] | None = None  # right and seen samples of its last evaluation
    seconds: float = 0.0  # the duration of its run, without that of the reference
    outcome: Verdict = "abstained"  # "abstained" until it has been compared
    # The mistakes, the first step first; the reason not to judge; the last words of a crash; empty if it passed.
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


def judge(row: VerifiedMode, outcome: Outcome, record: Record, reference: Record, settings: Configuration) -> None:
    """Complete the mode's `row` with the results of its runs; it passes only if it was compared.

    `reference` is the run of one device. Where the settings are not exact, no number is compared with one of its. The
    bounds are the row's own, or else those of the settings.
    """
    row.tolerance, row.seconds = row.tolerance or dict(settings.bounds), outcome.seconds
    if outcome.status != 0 and not record.resumed.folder.exists():
        row.outcome = "crashed"
        row.problems.append(outcome.last_words)
        return
    if record.steps != reference.steps:
        row.outcome = "failed"
        row.problems.append(f"the run ended after {len(record.steps)} of {len(reference.steps)} steps")
        return
    row.processes, row.nodes = record.size
    row.problems += _compare_steps(row, record, reference)
    row.problems += record.sample_problems(reference)
    if (reason := other_weights(reference, settings.added_callbacks)) is not None:
        row.outcome = "failed" if row.problems else "crashed" if outcome.status else "abstained"
        row.problems.append(f"{RESUMED}: {outcome.last_words}" if outcome.status else reason)
        return
    for source, run in {"": record, f"{ONE_DEVICE}: ": reference}.items():
        row.problems += [source + problem for problem in frozen_problems(run, settings)]
    row.problems += [*record.own_problems(), *record.count_problems(), *record.weight_problems()]
    row.problems += _compare_metrics(row, record, reference, settings)
    row.problems += _file_problems(record, reference, settings)
    crashed = outcome.status != 0 and not row.problems
    row.problems += [f"{RESUMED}: {problem}" for problem in _resumed_problems(outcome, record, settings)]
    row.outcome = "crashed" if crashed else "failed" if row.problems else "passed"


def _compare_steps(row: VerifiedMode, record: Record, reference: Record) -> list[str]:
    """The first tensor of each step beyond its bound."""
    problems = []
    for number in reference.steps:
        step, wanted = record.step(number), reference.step(number)
        row.losses.append(float(step["loss"]["loss"]))
        row.expected_losses.append(float(wanted["loss"]["loss"]))
        found = differences(step, wanted)
        for kind, value in largest(found).items():
            if kind in row.tolerance:
                row.differences[kind] = max(row.differences.get(kind, 0.0), value)
        problems += step_problems(found, row.tolerance, step=number)
    return problems


def frozen_problems(record: Record, settings: Configuration) -> list[str]:
    """What `--model.fine_tuning.freeze` names and has moved since the first step, before the epoch in which it may.

    The comparison with one device would not find what this does wrong too.
    """
    module = settings.plain_module
    if not module.frozen.parameters:
        return []
    last = record.ends_of_epochs.get((module.frozen.until or 0) - 1, max(record.steps))
    start, problems = record.step(min(record.steps)), []
    for number in [number for number in record.steps if number <= last]:
        step = record.step(number)
        for kind in (PARAMETERS, BUFFERS):
            for name, tensor in step.get(kind, {}).items():
                layer = name.rpartition(".")[0]
                still = name in module.frozen.parameters or (kind == BUFFERS and layer in module.frozen.norms)
                if still and not tensor.equal(start[kind][name]):
                    problems.append(f"step {number}: {name} is frozen, and has moved since step {min(record.steps)}")
    return first(problems)


def other_weights(alone: Record, added_callbacks: Sequence[str]) -> str | None:
    """The reason why evaluations and checkpoints cannot be judged by the steps of a run; None if they can.

    With a callback that averages weights, such as EMA, one device itself evaluates or saves weights that it does not
    train. Without any callback of the user's, that would be a mistake.
    """
    problems = alone.own_problems() if added_callbacks else []
    if not problems:
        return None
    return (
        f"not judged beyond its steps: with {', '.join(added_callbacks)} one device itself evaluates or saves other "
        f"weights than those of its steps ({problems[0]}); leave the callback out to have the rest judged"
    )


def _resumed_problems(outcome: Outcome, record: Record, settings: Configuration) -> list[str]:
    """Differences of the process that has repeated the last step from the first one: of bits on the CPU."""
    last, resumed = max(record.steps), record.resumed
    if outcome.status != 0:
        return [outcome.last_words]
    if resumed.steps != [last]:
        return [f"it has made the steps {resumed.steps}, not {last} alone"]
    bounds = {"loss": 0.0} | SAME_BITS if settings.on_cpu else settings.bounds
    problems = step_problems(differences(resumed.step(last), record.step(last)), bounds, step=last)
    problems += resumed.own_problems()
    if settings.on_cpu:
        source = f"{FIRST_RUN} has"
        problems += logged_problems(resumed.logged, record.logged, bounds=_SAME_METRICS, source=source)
        problems += entry_problems(resumed, record, bound=0.0, source=FIRST_RUN, leave_out=OF_RESUME)
        problems += table_problems(resumed, record, source=FIRST_RUN)
    return problems


def _compare_metrics(row: VerifiedMode, record: Record, reference: Record, settings: Configuration) -> list[str]:
    bounds = dict(_SAME_METRICS)
    if settings.num_parts is None:
        of_training = METRIC_BOUND if settings.is_exact else math.inf  # metrics with an infinite bound must exist
        # `_compare_evaluation` compares the values of "val/".
        bounds = {"train/loss": of_training, "train/acc": of_training, **_SAME_METRICS, "val/": math.inf}
    problems = logged_problems(record.logged, reference.logged, bounds=bounds, source=f"{ONE_DEVICE} has")
    for number in record.steps if settings.is_exact else []:
        problems += _compare_evaluation(row, number, record, reference, settings)
    return problems


def _compare_evaluation(
    row: VerifiedMode, number: int, record: Record, reference: Record, settings: Configuration
) -> list[str]:
    """Compare an evaluation after a step, if there was one, with one device that has the same weights."""
    if not (evaluated := record.evaluated(number)):
        return []
    problems = []
    if settings.num_parts is None:
        (samples, metrics), bound = evaluated_alone(record.step(number), settings), EXACT_BOUND
        own = {key: value for key, value in record.logged.items() if key[0] in metrics and key[1] == number}
        wanted, bounds = {key: metrics[key[0]] for key in own}, dict.fromkeys(metrics, METRIC_BOUND)
        problems += logged_problems(own, wanted, bounds=bounds, source=f"{SAME_WEIGHTS} has")
    else:  # the bits of the one device itself
        (samples,), bound = reference.evaluated(number).values(), 0.0
    for process, of_process in evaluated.items():
        gaps = of_process.gaps(samples)
        problems += logits_problems(f"evaluation after step {number}", process, gaps, bound=bound)
        row.differences[LOGITS] = max([row.differences.get(LOGITS, 0.0), *(gap for _, gap in gaps)])
    row.tolerance[LOGITS] = max(row.tolerance.get(LOGITS, 0.0), bound)
    if number == max(record.steps):
        row.counts = _sum([each.counts for each in record.first_of_ranks(evaluated)])
    return problems


def logits_problems(when: str, rank: int, gaps: Sequence[tuple[int, float]], *, bound: float) -> list[str]:
    """The first sample of process `rank` whose logits, or label, differ from one device's, and the number of others."""
    of = f"of process {rank} differ by"
    beyond = [(sample, gap) for sample, gap in gaps if not gap <= bound]
    return first([f"{when}: logits of sample {sample} {of} {gap:.1e}, allowed {bound:.1e}" for sample, gap in beyond])


def logged_problems(found: Logged, expected: Logged, *, bounds: Mapping[str, float], source: str) -> list[str]:
    """Logged values of a mode that are not as `expected`, name by name and step by step.

    `bounds` are those of |found - expected| / max(1, |expected|), by the beginning of a name; other names are left out.
    `source` names the origin of `expected` in words.
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


def _file_problems(record: Record, alone: Record, settings: Configuration) -> list[str]:
    problems = []
    if (last := record.evaluated(max(record.steps))) and alone.logged:
        problems += evaluation_table_problems(record, last, in_chunks=settings.num_parts is None)
    problems += checkpoint_problems(record, settings)
    problems += entry_problems(
        record,
        alone,
        bound=0.0 if settings.num_parts is not None else METRIC_BOUND if settings.is_exact else math.inf,
        source=ONE_DEVICE,
        leave_out=[*MAY_DIFFER, *(OF_ACCUMULATION if settings.accumulation > 1 else [])],
    )
    problems += table_problems(record, alone, source=ONE_DEVICE, leave_out=(PER_RANK, CONFUSION, DIGESTS))
    return problems + digest_problems(record, alone, settings.plain_module.network)


def checkpoint_problems(record: Record, settings: Configuration) -> list[str]:
    """Checkpoints that, loaded strictly into a plain module, are not bit for bit the step that they are of."""
    found = []
    for name, path in record.checkpoints.items():
        checkpoint = read_checkpoint(path)
        number = checkpoint.get(POSITION, {}).get("global_step")
        try:
            loaded = _loaded(checkpoint, settings)
        except (CheckpointError, RuntimeError, ValueError, KeyError, IndexError) as error:
            found.append(f"{name}: one device cannot load it: {str(error).splitlines()[0][:160]}")
            continue
        if number not in record.steps:
            found.append(f"{name}: it is of step {number}, which this run has not made")
            continue
        step = record.step(number)
        gaps = differences({**step, **loaded}, step)
        other = [(key, kind) for kind, by_name in gaps.items() for key, gap in by_name.items() if gap]
        found += first([f"{name}: {key} differs from step {number} ({kind})" for key, kind in other])
    return found


def _loaded(checkpoint: dict[str, Any], settings: Configuration) -> Step:
    check_header(checkpoint, settings.plain_module.header)
    network, weights = settings.plain_module.network, checkpoint["state_dict"]
    network.to(next(iter(weights.values())).dtype).load_state_dict(weights, strict=True)
    groups = settings.plain_module.optimization.parameter_groups(network)
    optimizer: Optimizer = made(settings.config["model"]["optimizer"], groups)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    return kinds(held(SimpleNamespace(strategy=None, optimizers=[optimizer]), network))


def entry_problems(
    found: Record, expected: Record, *, bound: float, source: str, leave_out: Collection[str]
) -> list[str]:
    """Entries of a run's checkpoints that differ from those of another run, and should not.

    Numbers in tensors may differ by `bound`, all else not at all. Where rounding may turn answers, and `bound` is
    infinite, the best checkpoint may be of a different step.
    """
    problems = []
    for name in sorted(found.checkpoints.keys() | expected.checkpoints.keys()):
        if name not in found.checkpoints or name not in expected.checkpoints:
            problems.append(f"{name}: only {source if name not in found.checkpoints else 'this run'} has one")
        elif name != BEST or math.isfinite(bound):
            mine, wanted = (
                dict(_entries("", read_checkpoint(record.checkpoints[name]), leave_out)) for record in (found, expected)
            )
            both = {key: (mine.get(key), wanted.get(key)) for key in {**wanted, **mine}}
            other = {key: [*map(_shown, pair)] for key, pair in both.items() if not _equal(*pair, bound=bound)}
            problems += first([f"{name}: {key} is {own}, {source} has {right}" for key, (own, right) in other.items()])
    return problems


def _entries(path: str, value: Any, leave_out: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The leaves of a checkpoint by their path in it; the run's own folder is called RUN."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if key not in leave_out:
                yield from _entries(f"{path}/{key}".lstrip("/"), inner, leave_out)
    else:
        yield _in_run(path), _in_run(value) if isinstance(value, str) else value


def _in_run(text: str) -> str:
    return re.sub(r"[^ ]*/run/checkpoints", "RUN/checkpoints", text)


def _equal(found: Any, wanted: Any, *, bound: float) -> bool:
    if not (isinstance(found, Tensor) and isinstance(wanted, Tensor)):
        rounded = isinstance(found, float) and math.isinf(bound)  # as the best loss that a ReduceLROnPlateau has seen
        return type(found) is type(wanted) and (rounded or bool(found == wanted))
    if found.dtype == wanted.dtype and torch.equal(found, wanted):  # infinite values are equal too
        return True
    return found.shape == wanted.shape and difference(found, wanted) <= bound


def _shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) and value.ndim else str(value)[:80]


def table_problems(found: Record, expected: Record, *, source: str, leave_out: Collection[str] = ()) -> list[str]:
    """Tables of a run that are not, byte for byte, those of another run."""
    paths = [path for record in (found, expected) for end in ("csv", "sha256") for path in record.run.glob(f"*.{end}")]
    problems = []
    for name in sorted({path.name for path in paths} - {METRICS, *leave_out}):
        problems += _line_problems(name, found.lines(name), expected.lines(name), f"the one that {source} has")
    return problems


def evaluation_table_problems(record: Record, last: dict[int, Evaluated], *, in_chunks: bool) -> list[str]:
    """Places where `per_rank.csv` and `confusion.csv` contradict the logits of the last evaluation.

    Replicas of `dp` are compared `in_chunks`, which virtual replicas divide differently, or else by process.
    """
    ranks, problems = record.first_of_ranks(last), []
    matrix = torch.zeros(2 * [ranks[0].logits.shape[1]], dtype=torch.int64)
    for rank in ranks:
        matrix.index_put_((rank.labels, rank.logits.argmax(dim=1)), torch.tensor(1), accumulate=True)
    if [list(map(int, row[2:])) for row in _rows(record, CONFUSION)] != matrix.tolist():
        problems.append(f"{CONFUSION} is not what the logits of the last evaluation say")
    *counted, total = [(int(row[2]), int(row[3])) for row in _rows(record, PER_RANK)] or [(0, 0)]
    share = max(1, len(counted) // len(ranks))  # replicas of one process of `dp`
    if in_chunks:
        wanted = [counts for rank in ranks for counts in rank.of_replicas(share)]
    else:
        wanted = [rank.counts for rank in ranks]
        counted = [_sum(counted[place : place + share]) for place in range(0, len(counted), share)]
    for place, (mine, right) in enumerate(zip_longest([*counted, total], [*wanted, _sum(wanted)])):
        if mine != right:
            who = "all" if place == len(wanted) else f"rank {place}"
            problems.append(f"{PER_RANK}: right and seen of {who} are {mine}, its logits say {right}")
    wrong = [row[1] for row in _rows(record, PER_RANK) if row[4] != f"{int(row[2]) / max(1, int(row[3])):.6f}"]
    return problems + [f"{PER_RANK}: the accuracy of {who} is not its quotient" for who in wrong]


def digest_problems(record: Record, expected: Record, network: nn.Module) -> list[str]:
    """Lines of `weights.sha256` that are not of the weights at the end of their epoch.

    There must be as many as `expected` has. The weights are put into `network`, one after the other.
    """
    ends = record.ends_of_epochs  # an epoch that has not ended is reported with its samples
    steps = (record.step(ends.get(epoch, max(record.steps))) for epoch in range(len(expected.lines(DIGESTS))))
    digests = [weights_digest(filled(network, step).state_dict()) for step in steps]
    wanted = [f"{line}  epoch {epoch}" for epoch, line in enumerate(digests)]
    return _line_problems(DIGESTS, record.lines(DIGESTS), wanted, "of the weights at the end of its epoch")


def _line_problems(name: str, found: Sequence[Any], wanted: Sequence[Any], source: str) -> list[str]:
    other = [number for number, (line, right) in enumerate(zip_longest(found, wanted), 1) if line != right]
    return first([f"{name}: line {number} is not {source}" for number in other])


def _rows(record: Record, name: str) -> list[list[str]]:
    return [row for row in csv.reader(record.lines(name)) if row[0] == "val"]


def _sum(counts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(right for right, _ in counts), sum(seen for _, seen in counts)
