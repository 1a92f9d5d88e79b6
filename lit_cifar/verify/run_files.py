"""The tables in a run folder, compared with what the run has computed, or with those of another run."""

import csv
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from lit_cifar.checkpoint import weights_digest
from lit_cifar.reporting import confusion, per_rank
from lit_cifar.verify.evaluation import Evaluated
from lit_cifar.verify.record import Record

METRICS = "metrics.csv"  # compared number by number, see `logged_metrics`
WEIGHTS = weights_digest.FILE
OF_EVALUATION = (per_rank.FILE_NAME, confusion.FILE_NAME)


def file_problems(found: Record, expected: Record, *, source: str, leave_out: Collection[str] = ()) -> list[str]:
    """Tables of which a run has not the same, byte for byte, as another one."""
    problems = []
    tables = {
        path.name for record in (found, expected) for end in ("csv", "sha256") for path in record.run.glob(f"*.{end}")
    }
    for name in sorted(tables - {METRICS, *leave_out}):
        mine, wanted = (_lines(record.run / name) for record in (found, expected))
        other = [
            number
            for number in range(max(len(mine), len(wanted)))
            if mine[number : number + 1] != wanted[number : number + 1]
        ]
        if other:
            problems.append(f"{name}: line {other[0] + 1} is not the one that {source} has")
    return problems


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def evaluation_file_problems(record: Record, last: dict[int, Evaluated]) -> list[str]:
    """Where `per_rank.csv` and `confusion.csv` are not what the logits of the last evaluation say, by process."""
    ranks = [evaluated for _, evaluated in sorted(record.first_of_ranks(last).items())]
    matrix = torch.zeros(2 * [ranks[0].logits.shape[1]], dtype=torch.int64)
    for evaluated in ranks:
        matrix.index_put_((evaluated.labels, evaluated.logits.argmax(dim=1)), torch.tensor(1), accumulate=True)
    problems = []
    table = [[int(count) for count in row[2:]] for row in _rows(record, confusion.FILE_NAME)]
    if table != matrix.tolist():
        problems.append(f"{confusion.FILE_NAME} is not what the logits of the last evaluation say")
    *each, total = [tuple(map(int, row[2:4])) for row in _rows(record, per_rank.FILE_NAME)] or [(0, 0)]
    share = max(1, len(each) // len(ranks))  # a process of `dp` has several replicas
    counted = [_sum(each[place : place + share]) for place in range(0, len(each), share)]
    wanted = [evaluated.counts for evaluated in ranks]
    for rank, (mine, its) in enumerate(zip([*counted, total], [*wanted, _sum(wanted)], strict=False)):
        if mine != its:
            who = "all" if rank == len(ranks) else f"rank {rank}"
            problems.append(
                f"{per_rank.FILE_NAME}: {who} has {mine[0]} of {mine[1]} right, its logits say {its[0]} of {its[1]}"
            )
    return problems


def _rows(record: Record, name: str) -> list[list[str]]:
    path = record.run / name
    with path.open(newline="") as file:
        return [row for row in csv.reader(file) if row[0] == "val"]


def _sum(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts, strict=True)))


def digest_problems(record: Record) -> list[str]:
    """Lines of `weights.sha256` that are not of the weights at the end of their epoch."""
    ends = record.ends_of_epochs
    found = [line.split("  epoch ") for line in _lines(record.run / WEIGHTS)]
    problems = []
    for said, epoch in found:
        step = record.step(ends[int(epoch)])
        if said != weights_digest.digest({**step["parameters"], **step["buffers"]}):
            problems.append(f"{WEIGHTS}: epoch {epoch} has not the digest of step {ends[int(epoch)]}")
    return problems
