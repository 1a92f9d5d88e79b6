"""Compares the checkpoints of a run with its own steps, and with those of another run."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_cifar.checkpoint.files import BEST
from lit_cifar.checkpoint.format import POSITION, read_checkpoint
from lit_cifar.errors import CheckpointError
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.verify.comparison import Step, and_more, difference, differences
from lit_cifar.tools.verify.configuration import made
from lit_cifar.tools.verify.pieces import kinds
from lit_cifar.tools.verify.rank_state import held
from lit_cifar.tools.verify.record import Record

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
