"""What every process of a run holds, and where processes that must hold the same values differ.

Rank 0 alone would not show what goes wrong elsewhere: softmax hides a shift of all logits, an average the share of one
process, and a strategy that collects a checkpoint may put right what had diverged.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.strategies.mesh import local_part
from lit_cifar.tools.verify.comparison import and_more

# By name, a kind in brackets: which part of the whole it is, and the digest. Equal names and parts are equal bits.
State: TypeAlias = dict[str, tuple[str, str]]
PARAMETERS, BUFFERS, OPTIMIZER, METRICS = "parameters", "buffers", "optimizer", "metrics"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a process held at a moment of a run."""

    when: str  # the moment, e.g. "step 2"
    rank: int
    same_as: str | None  # an earlier moment since which nothing may have changed; None if something was to
    state: State


def own_state(trainer: Any, module: nn.Module, *, one_model: bool) -> State:
    """This process's own parts: parameters, buffers and optimizer state, without those of other stages.

    With `one_model` all replicas have just been given the same running statistics, as for an evaluation. After a
    training step each has those of its own samples, unless BatchNorm is synchronised; they are overwritten by those of
    the first one before anybody uses them.
    """
    strategy = trainer.strategy
    apart = not one_model and getattr(strategy, "_layer_sync", None) is None
    replica = f"replica {BatchSplit.of(strategy).dp_rank}" if apart else ""
    return _state(held(trainer, module), replica=replica)


def module_state(module: nn.Module, *, replica: str = "") -> State:
    """Parameters and buffers of a module.

    `replica` says whose running statistics they are, where replicas have their own.
    """
    return _state(_tensors(module), replica=replica)


def _state(values: Iterable[tuple[str, str, Any]], *, replica: str) -> State:
    found: State = {}
    for name, kind, value in values:
        # Batches are counted alike by all; only what is averaged over samples is a replica's own.
        own = replica if kind == BUFFERS and value.is_floating_point() else ""
        found[f"{name} ({kind})"] = f"{_part(value)} {own}".strip(), digest(value)
    return found


def held(trainer: Any, module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and value of all that this process itself trains with: of a pipeline its own stages, elsewhere all."""
    pipeline = getattr(trainer.strategy, "pipeline", None)
    modules = [module] if pipeline is None else pipeline.stages.values()
    own = {tensor for part in modules for tensor in (*part.parameters(), *part.buffers())}
    yield from (found for found in _tensors(module) if found[2] in own)
    names: dict[Tensor, str] = {parameter: _plain(name) for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        yield from _optimizer_values(optimizer, names, held=own)


def _tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Parameters, and the buffers that are saved; names lose the prefix that a LightningModule gives to its network."""
    saved = module.state_dict().keys()
    yield from ((_plain(name), PARAMETERS, parameter) for name, parameter in module.named_parameters())
    yield from ((_plain(name), BUFFERS, buffer) for name, buffer in module.named_buffers() if name in saved)


@torch.no_grad()
def filled(network: nn.Module, step: Mapping[str, Mapping[str, Tensor]]) -> nn.Module:
    """`network` itself with the parameters and buffers of a step.

    Not by its state dict, which has tied weights under all their names; a step has them under the first.
    """
    found = {**step[PARAMETERS], **step.get(BUFFERS, {})}
    network.to(next(iter(found.values())).dtype)
    for name, _, tensor in _tensors(network):
        tensor.copy_(found[name])
    return network


def metrics_state(metrics: Mapping[str, Tensor]) -> State:
    """What a process takes for the values of the run's metrics, without those that each has of its own."""
    return {f"{name} ({METRICS})": ("", digest(float(value))) for name, value in metrics.items() if is_shared(name)}


def is_shared(metric: str) -> bool:
    """Whether a logged metric is one of the run: not of a process's share of a step, and not of the clock."""
    return not metric.endswith(("_step", "_per_s"))


def digest(value: Any) -> str:
    """Eight digits that differ where a bit of the local part does."""
    if not isinstance(value, Tensor):
        return f"{zlib.crc32(repr(value).encode()):08x}"
    bits = local_part(value.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{zlib.crc32(bits.numpy().data):08x}"


def peer_problems(snapshots: Sequence[Snapshot]) -> list[str]:
    """For each moment the first thing that processes which must have the same do not have the same."""
    moments: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        moments.setdefault(snapshot.when, []).append(snapshot)
    return [problem for when, peers in moments.items() for problem in _disagreements(when, peers)]


def _disagreements(when: str, peers: Sequence[Snapshot]) -> list[str]:
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    found = []
    for peer in peers:
        for name, (part, value) in peer.state.items():
            rank, first = seen.setdefault((name, part), (peer.rank, value))
            if value != first:
                found.append(f"{when}: {name} of process {peer.rank} is not that of process {rank}")
    return _first(found)


def change_problems(snapshots: Sequence[Snapshot]) -> list[str]:
    """For each process and moment the first thing that has changed since the one that it must be the same as."""
    by_moment = {(snapshot.rank, snapshot.when): snapshot for snapshot in snapshots}
    found = []
    for now in snapshots:
        before = by_moment.get((now.rank, now.same_as or ""))
        changed = [] if before is None else _changed(before.state, now.state)
        found += _first([f"{now.when}: {name} of process {now.rank} is not that of {now.same_as}" for name in changed])
    return found


def _changed(before: State, now: State) -> Iterator[str]:
    """Names of what both have with other bits; other replicas may have been given the first one's statistics."""
    for name, (part, value) in now.items():
        former_part, former = before.get(name, (part, value))
        if value != former and _of_first_replica(former_part) and _of_first_replica(part):
            yield name


def saved_problems(snapshots: Sequence[Snapshot], saved: Mapping[str, Any]) -> list[str]:
    """Where a process that has a whole network has another one than the checkpoint, whose "state_dict" is `saved`."""
    wanted = {name: digest(value) for name, value in saved.items()}
    found = []
    for snapshot in snapshots:
        other = [
            name
            for name, (part, value) in snapshot.state.items()
            if _of_first_replica(part) and value != wanted.get(name.split()[0])
        ]
        found += _first(
            [f"{snapshot.when}: {name} of process {snapshot.rank} is not the checkpoint's" for name in other]
        )
    return found


def _of_first_replica(part: str) -> bool:
    return "replica" not in part or part.endswith("replica 0")


def _first(problems: Sequence[str]) -> list[str]:
    return [problem + and_more(len(problems) - 1) for problem in problems[:1]]


def _optimizer_values(
    optimizer: Optimizer, names: Mapping[Tensor, str], *, held: set[Tensor]
) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and value of its settings and of its state for the parameters in `held`."""
    for number, group in enumerate(optimizer.param_groups):
        settings = {**group, "params": [names.get(parameter, "a stranger") for parameter in group["params"]]}
        for key, value in settings.items():
            yield f"group {number}:{key}", OPTIMIZER, value
        for parameter in group["params"]:
            if parameter in held:
                state = optimizer.state.get(parameter, {})  # asked with [], it would make an entry
                for key, value in {"entries": sorted(state), **state}.items():
                    yield f"{names[parameter]}:{key}", OPTIMIZER, value


def _plain(name: str) -> str:
    return name.removeprefix("network.")


def _part(tensor: Any) -> str:
    """Where this process stands along the axes of the mesh over which a tensor is divided; empty for a whole one."""
    if not isinstance(tensor, DTensor):
        return ""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    divided = [at for placement, at in zip(tensor.placements, coordinates, strict=True) if not placement.is_replicate()]
    return f"part {divided}" if divided else ""


# The tensors themselves: what a process holds of each, and the whole tensors that the pieces of all make --------------

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
