"""What a process holds of each tensor, as it is, and the whole tensors that the pieces of all processes make."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.strategies.mesh import local_part
from lit_cifar.tools.verify.rank_state import held

# "tensor": this process's own part; "at": its place along each axis of a mesh; "dims": what each axis divides, if any.
Piece: TypeAlias = dict[str, Any]
Pieces: TypeAlias = dict[str, dict[str, Piece]]  # by kind and name


def pieces_of(trainer: Any, module: torch.nn.Module) -> Pieces:
    """What this process answers for; nothing is gathered, and nothing is changed.

    Of tensors that every replica has, only the first replica writes its own: all others are compared bit for bit.
    """
    first = BatchSplit.of(trainer.strategy).dp_rank == 0
    return {
        kind: {name: _piece(tensor) for name, tensor in of_kind.items() if first or _is_divided(tensor)}
        for kind, of_kind in kinds(held(trainer, module)).items()
    }


def kinds(values: Iterable[tuple[str, str, Any]]) -> dict[str, dict[str, Tensor]]:
    """What has a number, by kind and name; of a list of names it is how many there are."""
    found: dict[str, dict[str, Tensor]] = {"parameters": {}, "buffers": {}, "optimizer": {}}
    for name, kind, value in values:
        if isinstance(value, Tensor | float | int | tuple | list):
            found[kind][name] = torch.as_tensor(len(value) if isinstance(value, list) else value)
    return found


def _is_divided(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def _piece(tensor: Tensor) -> Piece:
    own = local_part(tensor.detach()).cpu().clone()  # of a view `torch.save` would write all that it is a view of
    if not isinstance(tensor, DTensor):
        return {"tensor": own, "at": [], "dims": []}
    dims = [None if placement.is_replicate() else placement.dim for placement in tensor.placements]  # type: ignore[attr-defined]
    return {"tensor": own, "at": list(tensor.device_mesh.get_coordinate() or []), "dims": dims}


def put_together(processes: Iterable[Pieces]) -> dict[str, dict[str, Tensor]]:
    """The whole tensors by kind and name; of a part that several processes have, that of the first one."""
    found: dict[str, dict[str, list[Piece]]] = {}
    for pieces in processes:
        for kind, by_name in pieces.items():
            for name, piece in by_name.items():
                found.setdefault(kind, {}).setdefault(name, []).append(piece)
    return {
        kind: {
            name: whole({tuple(p["at"]): p["tensor"] for p in reversed(pieces)}, pieces[0]["dims"])
            for name, pieces in of.items()
        }
        for kind, of in found.items()
    }


def whole(pieces: Mapping[tuple[int, ...], Tensor], dims: Sequence[int | None]) -> Tensor:
    """The tensor whose parts stand at these places along the axes of a mesh.

    The first axis divides what the last one has left: `fully_shard` comes after tensor parallelism.
    """
    for dim in dims:
        rows: dict[tuple[int, ...], list[Tensor]] = {}
        for (_, *rest), piece in sorted(pieces.items(), key=lambda item: item[0]):
            rows.setdefault(tuple(rest), []).append(piece)
        pieces = {rest: row[0] if dim is None else torch.cat(row, dim) for rest, row in rows.items()}
    return pieces[()]
