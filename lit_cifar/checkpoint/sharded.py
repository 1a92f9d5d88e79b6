"""Checkpoints in parts: every process writes its own; any number of processes read theirs, or one reads all.

Such a checkpoint is a folder, and each file in it is like any other checkpoint. `rank0.ckpt` and so on hold the rows of
weights and optimizer state that a process has held. `index.ckpt` holds the rest: the shapes of tensors in parts, on the
meta device, and the hash of each file with rows. So files of two saves are never taken for one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_cifar.checkpoint.atomic import (
    INDEX,
    carried_hash,
    check_part,
    part_file,
    put_in_place,
    read_verified,
    remove,
    saving,
    snapshot,
    write_file,
)
from lit_cifar.checkpoint.format import PARTS, parts_of
from lit_cifar.errors import CheckpointError
from lit_cifar.internals import tree_map_only
from lit_cifar.mode.tensors import local_part, parameters_of
from lit_cifar.reporting.files import make_folder

_T = TypeVar("_T")


def save_parts(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write the folder `path`; at every moment `path`, or `previous.ckpt` beside it, is complete.

    Every process must call this.

    Raises:
        SaveError: Some process could not write its parts; all processes raise it. No part is left.
    """
    draft = path.with_name(f"{path.name}.part")
    held = {_name(each): each.held[each.key] for each in _entries(checkpoint)}
    own = {name: tensor.to_local() for name, tensor in held.items() if isinstance(tensor, DTensor)}

    @saving(path)
    def begin() -> None:
        make_folder(draft.parent)
        remove(draft)
        draft.mkdir()

    @saving(path)
    def write_own() -> str | None:
        file = part_file(draft, dist.get_rank())
        write_file(snapshot(own), file)
        return carried_hash(file)

    @saving(path)
    def finish() -> None:
        outline: dict[str, Any] = tree_map_only(Tensor, _outline, dict(checkpoint))
        write_file(outline | {PARTS: digests}, draft / INDEX)
        put_in_place(draft, path)

    try:
        _together(begin, first_alone=True)
        digests = _together(write_own)
        _together(finish, first_alone=True)
    except CheckpointError:
        if dist.get_rank() == 0:  # the other processes have stopped writing too
            with suppress(OSError):
                remove(draft)
        raise


def read_parts(
    read_index: Callable[[], dict[str, Any]], path: Path, *, network: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """The checkpoint whose index is read, with tensors divided like those of the network, or as it is if it has no
    parts.

    Every process must call this.

    Raises:
        CheckpointError: A part is missing, damaged or of a different save; all processes raise it.
    """
    likes: list[Any] = [network.state_dict()]
    likes += map(parameters_of, optimizers)

    def empty(entry: _Entry, outline: Tensor) -> Tensor:
        return torch.empty_like(likes[entry.group][entry.index], dtype=outline.dtype, requires_grad=False)

    def fill(checkpoint: dict[str, Any]) -> None:
        if not optimizers:  # an evaluation has none
            checkpoint["optimizer_states"] = []
        _together(partial(_fill, checkpoint, path, empty, rank=dist.get_rank(), num_ranks=dist.get_world_size()))

    return _of_one_save(read_index, fill)


def read_all(path: Path) -> dict[str, Any]:
    """Read `path` as one process would have written it. Raise a `CheckpointError` if a part is damaged."""
    whole = partial(_fill, path=path, empty=lambda entry, outline: torch.empty_like(outline, device="cpu"))
    return _of_one_save(lambda: read_verified(path / INDEX), whole)


def _of_one_save(read_index: Callable[[], dict[str, Any]], fill: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Read a checkpoint and fill in its parts, again whenever a training has saved meanwhile."""
    checkpoint = read_index()
    while digests := parts_of(checkpoint):
        try:
            fill(checkpoint)
        except CheckpointError:
            checkpoint = read_index()
            if checkpoint.get(PARTS) == digests:
                raise
    return checkpoint


class _Entry(NamedTuple):
    """The place of a tensor of the network or of an optimizer in a checkpoint."""

    group: int  # 0 for the network, 1 for the first optimizer
    index: Any  # the tensor's name in the network, or the number of the parameter
    held: dict[Any, Any]
    key: Any


def _entries(checkpoint: Mapping[str, Any]) -> Iterator[_Entry]:
    for name in checkpoint["state_dict"]:
        yield _Entry(0, name, checkpoint["state_dict"], name)
    for number, state in enumerate(checkpoint.get("optimizer_states", ()), start=1):
        for index, entry in state["state"].items():
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    yield _Entry(number, index, entry, key)


def _name(entry: _Entry) -> str:
    return f"{entry.group}/{entry.index}/{entry.key}"


def _rows(num_rows: int, rank: int, num_ranks: int) -> range:
    """The rows of a tensor that `rank` holds, by the rule of DTensor's `Shard(0)` and `torch.chunk`."""
    each = -(-num_rows // num_ranks)
    return range(num_rows)[rank * each : (rank + 1) * each]


def _fill(
    checkpoint: dict[str, Any],
    path: Path,
    empty: Callable[[_Entry, Tensor], Tensor],
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Put what `empty` makes in place of each outline, with the rows of `rank` read from the files that have some."""
    tensors: dict[str, Tensor] = {}
    for entry in _entries(checkpoint):
        if entry.held[entry.key].is_meta:
            tensors[_name(entry)] = entry.held[entry.key] = empty(entry, entry.held[entry.key])
    digests = checkpoint.pop(PARTS)
    for number, digest in enumerate(digests):
        found: dict[str, tuple[range, range, range]] = {}
        for name, tensor in tensors.items():
            own, there = _rows(len(tensor), rank, num_ranks), _rows(len(tensor), number, len(digests))
            both = range(max(own.start, there.start), min(own.stop, there.stop))
            if both:
                found[name] = own, there, both
        if not found:
            continue
        content = read_verified(part_file(path, number))
        check_part(part_file(path, number), digest)  # checked after reading: a replaced file does not come back
        for name, (own, there, both) in found.items():
            part = content[name][both.start - there.start : both.stop - there.start]
            local_part(tensors[name])[both.start - own.start : both.stop - own.start] = part


def _outline(tensor: Tensor) -> Tensor:
    """The shape of a tensor in parts, on the meta device; a copy on the CPU of any other."""
    if isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().to("cpu", copy=True)


def _together(job: Callable[[], _T], *, first_alone: bool = False) -> list[Any]:
    """Call `job` in all processes, or in the first one alone, and return the results.

    Every process raises the `CheckpointError` of the first one that fails.
    """
    result: _T | CheckpointError | None = None
    if dist.get_rank() == 0 or not first_alone:
        try:
            result = job()
        except CheckpointError as raised:
            result = raised
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    for each in results:
        if isinstance(each, CheckpointError):
            raise each
    return results
