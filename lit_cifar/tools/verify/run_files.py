"""The tables and checkpoints in a run folder, compared with what the run has computed, or with those of another."""

import csv
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.checkpoint.files import BEST, DIGESTS, digest
from lit_cifar.checkpoint.format import POSITION, read_checkpoint
from lit_cifar.errors import CheckpointError
from lit_cifar.reporting.evaluation_tables import CONFUSION, PER_RANK
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.verify.comparison import Step, and_more, difference, differences
from lit_cifar.tools.verify.configuration import made
from lit_cifar.tools.verify.evaluation import Evaluated
from lit_cifar.tools.verify.rank_state import filled, held, is_shared, kinds
from lit_cifar.tools.verify.record import Record

METRICS = "metrics.csv"  # compared number by number, see `logged_metrics`
OF_EVALUATION = (PER_RANK, CONFUSION)


def file_problems(found: Record, expected: Record, *, source: str, leave_out: Collection[str] = ()) -> list[str]:
    """Tables of which a run has not the same, byte for byte, as another one."""
    problems = []
    tables = {
        path.name for record in (found, expected) for end in ("csv", "sha256") for path in record.run.glob(f"*.{end}")
    }
    for name in sorted(tables - {METRICS, *leave_out}):
        problems += _line_problems(
            name, _lines(found, name), _lines(expected, name), source=f"the one that {source} has"
        )
    return problems


def _line_problems(name: str, found: list[str], wanted: list[str], *, source: str) -> list[str]:
    pairs = list(zip_longest(found, wanted))
    other = [number for number, (line, its) in enumerate(pairs, 1) if line != its]
    return [f"{name}: line {number} is not {source}" + and_more(len(other) - 1) for number in other[:1]]


def _lines(record: Record, name: str) -> list[str]:
    path = record.run / name
    return path.read_text().splitlines() if path.exists() else []


def evaluation_file_problems(record: Record, last: dict[int, Evaluated], *, in_chunks: bool = True) -> list[str]:
    """Where `per_rank.csv` and `confusion.csv` are not what the logits of the last evaluation say.

    By process, and `in_chunks` also by replica of `dp`, which virtual replicas divide in another way.
    """
    ranks = [evaluated for _, evaluated in sorted(record.first_of_ranks(last).items())]
    matrix = torch.zeros(2 * [ranks[0].logits.shape[1]], dtype=torch.int64)
    for evaluated in ranks:
        matrix.index_put_((evaluated.labels, evaluated.logits.argmax(dim=1)), torch.tensor(1), accumulate=True)
    problems = []
    if [list(map(int, row[2:])) for row in _rows(record, CONFUSION)] != matrix.tolist():
        problems.append(f"{CONFUSION} is not what the logits of the last evaluation say")
    rows = _rows(record, PER_RANK)
    *each, total = [(int(row[2]), int(row[3])) for row in rows] or [(0, 0)]
    share = max(1, len(each) // len(ranks))  # a process of `dp` has several replicas
    if share > 1 and in_chunks:
        counted, wanted = each, [counts for evaluated in ranks for counts in evaluated.of_replicas(share)]
    else:
        counted = [_sum(each[place : place + share]) for place in range(0, len(each), share)]
        wanted = [evaluated.counts for evaluated in ranks]
    for rank, (mine, its) in enumerate(zip_longest([*counted, total], [*wanted, _sum(wanted)])):
        if mine != its:
            who = "all" if rank == len(wanted) else f"rank {rank}"
            problems.append(f"{PER_RANK}: right and seen of {who} are {mine}, its logits say {its}")
    wrong = [row[1] for row in rows if row[4] != f"{int(row[2]) / max(1, int(row[3])):.6f}"]
    return problems + [f"{PER_RANK}: the accuracy of {who} is not its quotient" for who in wrong]


def _rows(record: Record, name: str) -> list[list[str]]:
    return [row for row in csv.reader(_lines(record, name)) if row[0] == "val"]


def _sum(counts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(right for right, _ in counts), sum(seen for _, seen in counts)


def digest_problems(record: Record, expected: Record, network: nn.Module) -> list[str]:
    """Lines of `weights.sha256` that are not of the weights at the end of their epoch, of as many as `expected` has.

    The weights are put into `network`, one after the other.
    """
    ends = record.ends_of_epochs  # an epoch that has not ended is reported by its samples
    steps = (record.step(ends.get(epoch, max(record.steps))) for epoch in range(len(_lines(expected, DIGESTS))))
    digests = [digest(filled(network, step).state_dict()) for step in steps]
    wanted = [f"{line}  epoch {epoch}" for epoch, line in enumerate(digests)]
    return _line_problems(DIGESTS, _lines(record, DIGESTS), wanted, source="of the weights at the end of its epoch")


# metrics.csv ---------------------------------------------------------------------------------------------------------

Logged: TypeAlias = dict[tuple[str, int], float]  # by name and optimizer step, counted from 1


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


# Checkpoints ---------------------------------------------------------------------------------------------------------

# Entries that need not be those of the reference, and why.
MAY_DIFFER = {
    "state_dict": "each checkpoint's is compared with the steps of its own run",
    "optimizer_states": "likewise",
    "update_count": "how many batches a process has counted depends on the number of processes",
    "epoch_loop.val_loop.batch_progress": "so does how many it has evaluated, and nothing reads it",
}
OF_ACCUMULATION = {"loops": "Lightning counts the batches of the loader, and an accumulated step has several"}
OF_RESUME = {
    "current_score": "Lightning forgets the last score of the best checkpoint, and nothing reads it",
    "epoch_loop.val_loop.batch_progress": "a resumed run counts them from 0",
}


def checkpoint_problems(record: Record, module: LitResNet, *, config: Mapping[str, Any]) -> list[str]:
    """Where a checkpoint, loaded strictly into a plain `module`, is not bit for bit the step that it is of."""
    found = []
    for name, path in record.checkpoints.items():
        checkpoint = read_checkpoint(path)
        number = checkpoint.get(POSITION, {}).get("global_step")
        try:
            loaded = _loaded(checkpoint, module, config)
        except (CheckpointError, RuntimeError, ValueError, KeyError, IndexError) as error:
            found.append(f"{name}: one device cannot load it: {str(error).splitlines()[0][:160]}")
            continue
        if number not in record.steps:
            found.append(f"{name}: it is of step {number}, which this run has not made")
            continue
        step = record.step(number)
        gaps = differences({**step, **loaded}, step)
        other = [(key, kind) for kind, by_name in gaps.items() for key, gap in by_name.items() if gap]
        found += [
            f"{name}: {key} differs from step {number} ({kind})" + and_more(len(other) - 1) for key, kind in other[:1]
        ]
    return found


def _loaded(checkpoint: dict[str, Any], module: LitResNet, config: Mapping[str, Any]) -> Step:
    module.header.check(checkpoint)
    network, weights = module.network, checkpoint["state_dict"]
    network.to(next(iter(weights.values())).dtype).load_state_dict(weights, strict=True)
    optimizer: Optimizer = made(config["model"]["optimizer"], network.parameters())
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    return kinds(held(SimpleNamespace(strategy=None, optimizers=[optimizer]), network))


def entry_problems(
    found: Record, expected: Record, *, bound: float, source: str, leave_out: Collection[str] = ()
) -> list[str]:
    """Where the checkpoints of a run are not entry by entry those of another one, of which it should have the same.

    Numbers in tensors may differ by `bound`, all else not at all. Of metrics, of which every rank has a row, the sums
    are compared. Where rounding may turn answers, and `bound` is infinite, the best checkpoint may be of another step.
    """
    problems = []
    for name in sorted(found.checkpoints.keys() | expected.checkpoints.keys()):
        if name not in found.checkpoints or name not in expected.checkpoints:
            problems.append(f"{name}: only {source if name not in found.checkpoints else 'this run'} has one")
        elif name != BEST or math.isfinite(bound):
            mine, wanted = (
                dict(_entries("", read_checkpoint(record.checkpoints[name]), leave_out)) for record in (found, expected)
            )
            other = [key for key in {**wanted, **mine} if not _equal(mine.get(key), wanted.get(key), bound=bound)]
            problems += [
                f"{name}: {key} is {_shown(mine.get(key))}, {source} has {_shown(wanted.get(key))}"
                + and_more(len(other) - 1)
                for key in other[:1]
            ]
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
        return type(found) is type(wanted) and bool(found == wanted)
    if found.shape != wanted.shape and found.shape[1:] == wanted.shape[1:]:
        found, wanted = found.sum(0), wanted.sum(0)
    if found.dtype == wanted.dtype and torch.equal(found, wanted):  # also where both are infinite
        return True
    return found.shape == wanted.shape and difference(found, wanted) <= bound


def _shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) and value.ndim else str(value)[:80]
