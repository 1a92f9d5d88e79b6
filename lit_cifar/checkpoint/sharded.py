"""Checkpoints in parts: every process writes the parts that it holds; any number read theirs, or one reads all.

Such a checkpoint is a folder. Its `index.ckpt` is a file like every other checkpoint, with the difference that tensors
in parts have their shape alone, on the meta device; and it says in which file each part is. Who writes and who reads
what, `torch.distributed.checkpoint` plans. The index that this would write is a pickle, and reading it would run code.
"""

import hashlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lit_cifar.checkpoint.files import INDEX, put_in_place, read_whole, remove, save_error, write_checkpoint
from lit_cifar.errors import CheckpointError, SaveError, one_line
from lit_cifar.reporting.files import make_folder

_KEY = "parts"


class _Piece(NamedTuple):
    """Where a part of a tensor is, as DCP's own record of it, and the hash of these bytes."""

    relative_path: str
    offset: int
    length: int
    sha256: str
    transform_descriptors: None = None


def save_parts(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write the folder `path`; at every moment it, or `previous.ckpt` beside it, is complete. All must call this.

    Raises:
        SaveError: On every process, if one could not write its parts.
    """
    found = ((_name(each), each.held[each.key]) for each in _entries(checkpoint))
    parts = {name: tensor for name, tensor in found if isinstance(tensor, DTensor)}
    outline = tree_map_only(Tensor, _outline, dict(checkpoint))
    try:
        save(parts, storage_writer=_Writer(outline, path))
    except CheckpointException as failure:
        error, _ = next(iter(failure.failures.values()))
        if isinstance(error, OSError):
            raise save_error(error, path, checkpoints=path.parent) from error
        raise SaveError(f"{path} could not be saved: {one_line(error)}", remedy="look at the disk") from error


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
    return _filled(
        checkpoint,
        path,
        lambda entry, dtype: torch.empty_like(likes[entry.group][entry.index], dtype=dtype, requires_grad=False),
    )


def read_all(path: Path) -> dict[str, Any]:
    """What one process would have written in place of `path`; raises a `CheckpointError` if a part is damaged."""
    checkpoint = read_whole(path / INDEX)
    if not in_parts(checkpoint):
        return checkpoint
    return _filled(
        checkpoint,
        path,
        lambda entry, dtype: torch.empty_like(entry.held[entry.key], dtype=dtype, device="cpu"),
        no_dist=True,
    )


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


def _filled(
    checkpoint: dict[str, Any], path: Path, empty: Callable[[_Entry, torch.dtype], Tensor], **settings: Any
) -> dict[str, Any]:
    """`checkpoint` with the content of what `empty` makes for each tensor in parts."""
    outlines = [entry for entry in _entries(checkpoint) if entry.held[entry.key].is_meta]
    parts = {_name(entry): empty(entry, entry.held[entry.key].dtype) for entry in outlines}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is asked for
            load(parts, storage_reader=_Reader(path, checkpoint.pop(_KEY)), **settings)
    except CheckpointException as failure:
        error, _ = next(iter(failure.failures.values()))
        raise CheckpointError(
            f"{path} cannot be read: {one_line(error)}", remedy="use another checkpoint of the run: --ckpt_path=FILE"
        ) from error
    for entry in outlines:
        entry.held[entry.key] = parts[_name(entry)]
    return checkpoint


def _outline(tensor: Tensor) -> Tensor:
    """Of what is in parts its shape, on the meta device; else a copy on the CPU."""
    if isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().to("cpu", copy=True)


class _Writer(FileSystemWriter):
    """Writes a draft beside `path`, which the first process puts in its place when all are done."""

    def __init__(self, outline: dict[str, Any], path: Path) -> None:
        super().__init__(path.with_name(f"{path.name}.part"))
        self._outline, self._final, self._draft = outline, path, Path(self.path)

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the first process makes the folder, for all

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        make_folder(self._draft.parent)
        remove(self._draft)
        self._draft.mkdir()
        return super().prepare_global_plan(plans)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        hashed: Future[list[WriteResult]] = Future()
        written = super().write_data(plan, planner).wait()
        hashed.set_result([replace(result, storage_data=self._piece(result.storage_data)) for result in written])
        return hashed

    def _piece(self, written: Any) -> _Piece:
        with (self._draft / written.relative_path).open("rb") as file:
            file.seek(written.offset)
            digest = hashlib.sha256(file.read(written.length)).hexdigest()
        return _Piece(written.relative_path, written.offset, written.length, digest)

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        index = {
            "tensors": {
                name: {
                    "dtype": str(found.properties.dtype).removeprefix("torch."),
                    "size": [*found.size],
                    "chunks": [([*chunk.offsets], [*chunk.sizes]) for chunk in found.chunks],
                }
                for name, found in metadata.state_dict_metadata.items()
                if isinstance(found, TensorStorageMetadata)
            },
            "pieces": [
                (result.index.fqn, [*(result.index.offset or ())], tuple(result.storage_data)[:4])
                for written in results
                for result in written
            ],
        }
        write_checkpoint(self._outline | {_KEY: index}, self._draft / INDEX)
        put_in_place(self._draft, self._final)


class _Reader(FileSystemReader):
    """Reads no more than tensors, and compares them with their hash."""

    def __init__(self, path: Path, index: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._index = index

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, found["dtype"])),
                torch.Size(found["size"]),
                [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in found["chunks"]],
            )
            for name, found in self._index["tensors"].items()
        }
        pieces = {
            MetadataIndex(name, torch.Size(offset)): _Piece(Path(piece[0]).name, *piece[1:])
            for name, offset, piece in self._index["pieces"]
        }
        return Metadata(tensors, storage_data=pieces)

    @override
    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        content = file.read(sinfo.length)
        if hashlib.sha256(content).hexdigest() != sinfo.sha256:
            raise ValueError(f"{sinfo.relative_path} is damaged: its content does not match the hash in {INDEX}")
        return io.BytesIO(content)
