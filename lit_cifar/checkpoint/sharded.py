"""Checkpoints in parts: every process writes the parts that it holds; any number read theirs, or one reads all.

Such a checkpoint is a folder, and each file in it is one like every other checkpoint. `rank0.ckpt` and so on hold the
rows of weights and optimizer state that a process has held. `index.ckpt` holds the rest: of what is in parts the shape
alone, on the meta device, and in how many files its rows are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lit_cifar.checkpoint.files import INDEX, put_in_place, read_whole, remove, saving, snapshot, write_file
from lit_cifar.errors import CheckpointError
from lit_cifar.reporting.files import make_folder

_KEY = "parts"


def save_parts(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write the folder `path`; at every moment it, or `previous.ckpt` beside it, is complete. All must call this.

    Raises:
        SaveError: On every process, if one could not write its parts.
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
    def write_own() -> None:
        write_file(snapshot(own), draft / _file_of(dist.get_rank()))

    @saving(path)
    def finish() -> None:
        outline: dict[str, Any] = tree_map_only(Tensor, _outline, dict(checkpoint))
        write_file(outline | {_KEY: dist.get_world_size()}, draft / INDEX)
        put_in_place(draft, path)

    _together(begin, first_alone=True)
    _together(write_own)
    _together(finish, first_alone=True)


def in_parts(checkpoint: Mapping[str, Any]) -> bool:
    return _KEY in checkpoint


def read_parts(
    checkpoint: dict[str, Any], path: Path, *, network: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """`checkpoint`, from the index of `path`, with tensors divided as those of the network. All must call this.

    Raises:
        CheckpointError: On every process, if one found a part missing or damaged.
    """
    if not optimizers:  # in an evaluation
        checkpoint = {**checkpoint, "optimizer_states": []}
    likes: list[Any] = [network.state_dict()]
    likes += [[each for group in optimizer.param_groups for each in group["params"]] for optimizer in optimizers]

    def empty(entry: _Entry, outline: Tensor) -> Tensor:
        return torch.empty_like(likes[entry.group][entry.index], dtype=outline.dtype, requires_grad=False)

    _together(partial(_fill, checkpoint, path, empty, rank=dist.get_rank(), num_ranks=dist.get_world_size()))
    return checkpoint


def read_all(path: Path) -> dict[str, Any]:
    """What one process would have written in place of `path`; raises a `CheckpointError` if a part is damaged."""
    checkpoint = read_whole(path / INDEX)
    if in_parts(checkpoint):
        _fill(checkpoint, path, lambda entry, outline: torch.empty_like(outline, device="cpu"))
    return checkpoint


class _Entry(NamedTuple):
    """Where a checkpoint has a tensor of the network or of an optimizer."""

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


def _file_of(rank: int) -> str:
    return f"rank{rank}.ckpt"


def _rows(num_rows: int, rank: int, num_ranks: int) -> range:
    """Those of a tensor that `rank` holds, as DTensor's `Shard(0)` and `torch.chunk` cut it."""
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
    num_files = checkpoint.pop(_KEY)
    for number in range(num_files):
        found: dict[str, tuple[range, range, range]] = {}
        for name, tensor in tensors.items():
            own, there = _rows(len(tensor), rank, num_ranks), _rows(len(tensor), number, num_files)
            both = range(max(own.start, there.start), min(own.stop, there.stop))
            if both:
                found[name] = own, there, both
        content = read_whole(path / _file_of(number)) if found else {}
        for name, (own, there, both) in found.items():
            part = content[name][both.start - there.start : both.stop - there.start]
            _local(tensors[name])[both.start - own.start : both.stop - own.start] = part


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _outline(tensor: Tensor) -> Tensor:
    """Of what is in parts its shape, on the meta device; else a copy on the CPU."""
    if isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().to("cpu", copy=True)


def _together(job: Callable[[], None], *, first_alone: bool = False) -> None:
    """Do `job`, in all processes or in the first one; each raises the `CheckpointError` of the first that fails."""
    error: CheckpointError | None = None
    if dist.get_rank() == 0 or not first_alone:
        try:
            job()
        except CheckpointError as raised:
            error = raised
    errors: list[CheckpointError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for each in filter(None, errors):
        raise each
