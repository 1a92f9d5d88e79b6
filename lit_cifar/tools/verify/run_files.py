"""The tables in a run folder, compared with what the run has computed, or with those of another run."""

import csv
from collections.abc import Collection, Sequence
from itertools import zip_longest

import torch
from torch import nn

from lit_cifar.checkpoint.files import DIGESTS, digest
from lit_cifar.reporting.evaluation_tables import CONFUSION, PER_RANK
from lit_cifar.tools.verify.comparison import and_more
from lit_cifar.tools.verify.evaluation import Evaluated
from lit_cifar.tools.verify.rank_state import filled
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
