"""Checkpoints and tables of a run: whether they say what the run did, and what those of one device say."""

import re
from collections.abc import Collection, Iterator
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lit_cifar.checkpoint.compatibility import check_header
from lit_cifar.checkpoint.files import DIGESTS
from lit_cifar.checkpoint.format import POSITION, read_checkpoint
from lit_cifar.configured import made
from lit_cifar.errors import CheckpointError, one_line
from lit_cifar.reporting.evaluation_tables import PER_RANK
from lit_cifar.reporting.files import read_csv
from lit_cifar.reporting.rank_statistics import AccuracyCount, pooled
from lit_cifar.task.optim import keep_saved_types
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.record import LOSS, METRICS, Evaluated, Record, first_of, gap, gaps_of_step
from lit_cifar.tools.verify.recorder import Step, numbers, own_values

# Entries of a checkpoint that need not be those of the one device, and why.
MAY_DIFFER = {
    "state_dict": "each checkpoint's is compared with the steps of its own run",
    "optimizer_states": "likewise",
    "epoch_loop.val_loop.batch_progress": "depends on the number of processes, and nothing reads it",
    "time_elapsed": "of --trainer.max_time",
}
OF_ACCUMULATION = {"loops": "Lightning counts the batches of the loader, and an accumulated step has several"}
OF_RESUME = {
    "current_score": "Lightning forgets the last score of the best checkpoint, and nothing reads it",
    "epoch_loop.val_loop.batch_progress": "a resumed run counts them from 0",
    "time_elapsed": "of --trainer.max_time",
    "ModelCheckpoint{": "Lightning's forgets its files in a folder of another name, and numbers them anew",
}


def file_problems(record: Record, alone: Record, settings: Configuration, *, source: str) -> list[str]:
    """All that is wrong with a run's files, beside those of the one device, which is called `source`."""
    problems = []
    if (last := record.evaluated(max(record.steps))) and alone.logged:
        problems += per_rank_problems(record, last)
    problems += checkpoint_problems(record, settings)
    may_differ = [*MAY_DIFFER, *(OF_ACCUMULATION if settings.accumulation > 1 else [])]
    problems += entry_problems(record, alone, bound=settings.metric_bound, source=source, leave_out=may_differ)
    return problems + table_problems(record, alone, source=source, leave_out=(PER_RANK, DIGESTS))


def checkpoint_problems(record: Record, settings: Configuration) -> list[str]:
    """Checkpoints that, loaded strictly into a plain module, are not bit for bit the step that they are of."""
    found = []
    for name, path in record.checkpoints.items():
        checkpoint = read_checkpoint(path)
        number = checkpoint.get(POSITION, {}).get("global_step")
        try:
            loaded = _loaded(checkpoint, settings)
        except (CheckpointError, RuntimeError, ValueError, KeyError, IndexError) as error:
            found.append(f"{name}: one device cannot load it: {one_line(error)[:160]}")
            continue
        if number not in record.steps:
            found.append(f"{name}: it is of step {number}, which this run has not made")
            continue
        gaps = gaps_of_step(loaded, {key: value for key, value in record.step(number).items() if key[0] != LOSS})
        other = [key for key, size in gaps.items() if size]
        found += first_of([f"{name}: {key} differs from step {number} ({kind})" for kind, key in other])
    return found


def _loaded(checkpoint: dict[str, Any], settings: Configuration) -> Step:
    check_header(checkpoint, settings.module.header)
    network, weights = settings.module.network, checkpoint["state_dict"]
    floating = next(each.dtype for each in weights.values() if each.is_floating_point())
    network.to(floating).load_state_dict(weights, strict=True)
    groups = settings.module.optimization.parameter_groups(network)
    optimizer: Optimizer = made(settings.config["model"]["optimizer"], groups)
    keep_saved_types(optimizer)  # as `fit` does
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    return numbers(own_values(SimpleNamespace(strategy=None, optimizers=[optimizer]), network))


def entry_problems(
    found: Record, expected: Record, *, bound: float, source: str, leave_out: Collection[str]
) -> list[str]:
    """Entries of a run's checkpoints that differ from those of another run, and should not.

    Numbers in tensors may differ by `bound`, all else not at all.
    """
    problems = []
    for name in sorted(found.checkpoints.keys() | expected.checkpoints.keys()):
        if name not in found.checkpoints or name not in expected.checkpoints:
            problems.append(f"{name}: only {source if name not in found.checkpoints else 'this run'} has one")
        else:
            contents = (read_checkpoint(record.checkpoints[name]) for record in (found, expected))
            mine, wanted = (dict(_entries("", content, leave_out)) for content in contents)
            both = {key: (mine.get(key), wanted.get(key)) for key in {**wanted, **mine}}
            other = {key: [*map(_shown, pair)] for key, pair in both.items() if not _equal(*pair, bound=bound)}
            said = [f"{name}: {key} is {own}, {source} has {right}" for key, (own, right) in other.items()]
            problems += first_of(said)
    return problems


def _entries(path: str, value: Any, leave_out: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The leaves of a checkpoint by their path in it; the run's own folder is called RUN."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if not str(key).startswith(tuple(leave_out)):
                yield from _entries(f"{path}/{key}".lstrip("/"), inner, leave_out)
    else:
        in_run = partial(re.sub, r"[^ ]*/run/checkpoints", "RUN/checkpoints")
        yield in_run(path), in_run(value) if isinstance(value, str) else value


def _equal(found: Any, wanted: Any, *, bound: float) -> bool:
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        return gap(found, wanted) <= bound
    return type(found) is type(wanted) and bool(found == wanted)


def _shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) and value.ndim else str(value)[:80]


def table_problems(found: Record, expected: Record, *, source: str, leave_out: Collection[str] = ()) -> list[str]:
    """Tables of a run that are not, byte for byte, those of another run."""
    paths = [path for record in (found, expected) for end in ("csv", "sha256") for path in record.run.glob(f"*.{end}")]
    problems = []
    for name in sorted({path.name for path in paths} - {METRICS, *leave_out}):
        pairs = zip_longest(found.lines(name), expected.lines(name))
        other = [number for number, (line, right) in enumerate(pairs, 1) if line != right]
        problems += first_of([f"{name}: line {number} is not the one that {source} has" for number in other])
    return problems


def per_rank_problems(record: Record, last: dict[int, Evaluated]) -> list[str]:
    """Processes whose rows in `per_rank.csv` contradict the logits of the last evaluation."""
    first = {each.data_parallel_rank: each for _, each in sorted(last.items(), reverse=True)}
    wanted, problems = [each.count for _, each in sorted(first.items())], []
    rows = [row for row in read_csv(record.run / PER_RANK) if row[0] == "val"]
    counts = [AccuracyCount(int(right), int(seen)) for _, _, right, seen, _ in rows]
    *counted, total = counts or [AccuracyCount(0, 0)]
    share = max(1, len(counted) // len(wanted))  # replicas of one process of `dp`
    found = [pooled(counted[place : place + share]) for place in range(0, len(counted), share)]
    for place, (mine, right) in enumerate(zip_longest([*found, total], [*wanted, pooled(wanted)])):
        if mine != right:
            who = "all" if place == len(wanted) else f"rank {place}"
            problems.append(f"{PER_RANK}: {who} has {mine}, its logits say {right}")
    return problems
