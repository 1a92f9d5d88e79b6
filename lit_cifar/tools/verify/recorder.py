"""The callback by which every process of a run, in every mode, writes down its tensors and samples.

Rank 0 alone would not show what goes wrong elsewhere: softmax hides a shift of all logits, an average the share of one
process, and a strategy that collects a checkpoint may put right what had diverged.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_cifar.data.images import Batch
from lit_cifar.mode import mode_of
from lit_cifar.mode.tensors import local_part

# The part of the whole, and the digest, by name with the kind in brackets. Processes with a part must have its bits.
State: TypeAlias = dict[str, tuple[str, str]]
PARAMETERS, BUFFERS, OPTIMIZER, METRICS = "parameters", "buffers", "optimizer", "metrics"
WHOLE_NETWORK = "whole network"  # the moment behind a run

Key: TypeAlias = tuple[str, str]  # kind and name
Step: TypeAlias = Mapping[Key, Tensor]
Piece: TypeAlias = dict[str, Any]  # a process's own part of a tensor: "tensor", and "divided" as `_divided` says


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    when: str  # the moment, such as "step 2"
    rank: int
    same_as: str | None  # an earlier moment since which nothing may have changed; None if something was to
    state: State


class LastBits(L.Callback):
    """Changes the last bits of the weights before the first step, which shows how far rounding can move a training."""

    @torch.no_grad()
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():  # up or down: BatchNorm would undo one factor for all
            parameter.copy_(parameter.nextafter(parameter.flatten().roll(1).view_as(parameter)))


class Trace(L.Callback):
    """Writes down what every process holds after every optimizer step and in every evaluation.

    It only reads: nothing is gathered from other processes, and nothing is written into a tensor, as that could put
    right what a strategy does wrong. Process `r` writes `step<k>-<r>.pt` (its loss, the ids of its samples, and its
    pieces of all tensors, see `pieces_of`), `evaluation<k>-<r>.pt` (ids, labels and logits, of the weights after step
    k) and `own<r>.jsonl` (a `Snapshot` in each line: digests of its tensors).
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []  # ids, labels and logits of an evaluation
        self._step = 0
        self._loss: Tensor | float = 0.0
        self._ids: list[int] = []  # samples of a step
        self._one_model = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer, self._module = trainer, pl_module
        # TF32 has 10 bits: float32 would not be what it is on the CPU.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = True  # processes of `tp` that compute the same must get the same bits

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, *_: Any) -> None:
        self._ids += batch.ids.tolist()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Add to the loss, and after the last accumulation step write everything down."""
        self._loss = self._loss + outputs["loss"].detach()
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._one_model = False
        self._write_own(f"step {self._step}", self._own_state())
        step = {"data_parallel_rank": self._data_parallel_rank, "loss": float(self._loss), "ids": self._ids}
        self._save("step", step | {"pieces": pieces_of(trainer, pl_module)})
        self._loss, self._ids = 0.0, []

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Batch, *_: Any) -> None:
        """Write down logits, and after the first batch the tensors that have computed them."""
        self._batches.append((batch.ids.cpu(), batch.labels.cpu(), outputs.detach().cpu().clone()))
        if len(self._batches) == 1:
            self._one_model = True
            self._write_own(f"{self._evaluation}, first batch", self._own_state(), same=True)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write_own(self._evaluation, self._own_state(), same=True)
        ids, labels, logits = (torch.cat(column) for column in zip(*self._batches, strict=True))
        evaluated = {"ids": ids, "labels": labels, "logits": logits, "data_parallel_rank": self._data_parallel_rank}
        self._save("evaluation", evaluated)
        self._batches = []

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down the end, when all other callbacks have had their turn."""
        teardown = trainer.strategy.teardown

        def written_before_and_after() -> None:
            self._write_own("end", self._own_state() | metrics_state(trainer.callback_metrics), same=True)
            with_statistics = self._shares_statistics
            teardown()
            self._write_own(WHOLE_NETWORK, _state(_tensors(pl_module), with_statistics=with_statistics))

        trainer.strategy.teardown = written_before_and_after  # type: ignore[method-assign]

    @property
    def _evaluation(self) -> str:
        return f"evaluation after step {self._step}"

    @property
    def _data_parallel_rank(self) -> int:
        return mode_of(self._trainer.strategy).layout.data_parallel_rank

    @property
    def _shares_statistics(self) -> bool:
        """Whether all replicas have the same running statistics, such as in an evaluation.

        After a step each has those of its own samples, unless synchronised; the first one's replace them before use.
        """
        mode = mode_of(self._trainer.strategy)
        return self._one_model or mode.synchronises_batchnorm or mode.layout.data_parallel_size == 1

    def _own_state(self) -> State:
        """This process's own parts: parameters, buffers and optimizer state, without those of other stages."""
        return _state(own_values(self._trainer, self._module), with_statistics=self._shares_statistics)

    def _write_own(self, when: str, state: State, *, same: bool = False) -> None:
        rank, same_as = self._trainer.global_rank, f"step {self._step}" if same else None
        snapshot = Snapshot(when=when, rank=rank, same_as=same_as, state=state)
        with (self.folder / f"own{rank}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(snapshot)) + "\n")

    def _save(self, what: str, content: dict[str, Any]) -> None:
        torch.save(content, self.folder / f"{what}{self._step}-{self._trainer.global_rank}.pt")


def pieces_of(trainer: Any, module: nn.Module) -> dict[Key, Piece]:
    """The tensors that this process answers for; nothing is gathered, and nothing is changed.

    Only the first replica writes tensors that every replica has: those of the others are compared bit for bit.
    """
    is_first = mode_of(trainer.strategy).layout.data_parallel_rank == 0
    held = numbers(own_values(trainer, module))
    return {
        # `torch.save` would write all that a view is a view of.
        key: {"tensor": local_part(tensor.detach()).cpu().clone(), "divided": _divided(tensor)}
        for key, tensor in held.items()
        if is_first or _divided(tensor)
    }


def _divided(tensor: Any) -> tuple[int, int] | None:
    """The number of this process's part, and the dimension that all processes divide; None for a whole tensor."""
    if not isinstance(tensor, DTensor):
        return None
    placements: Any = tensor.placements
    (placement,) = placements  # a mode divides tensors along one axis of its mesh
    return None if placement.is_replicate() else (tensor.device_mesh.get_local_rank(), placement.dim)


def numbers(values: Iterable[tuple[str, str, Any]]) -> dict[Key, Tensor]:
    """The numbers among values, of which each comes with name and kind; that of a list of names is its length."""
    found: dict[Key, Tensor] = {}
    for name, kind, value in values:
        if isinstance(value, Tensor | float | int | tuple | list):
            number: Any = len(value) if isinstance(value, list) else value
            number = [each or 0.0 for each in number] if isinstance(number, tuple) else number  # Adafactor has a None
            # float32, torch's default, would round a rate by more than is allowed
            found[kind, name] = number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)
    return found


def own_values(trainer: Any, module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and value of all that this process itself trains: in a pipeline its own stages, elsewhere all."""
    own = {*module.parameters(), *module.buffers()} - mode_of(trainer.strategy).trained_elsewhere()
    yield from (found for found in _tensors(module) if found[2] in own)
    names: dict[Tensor, str] = {parameter: _plain(name, module) for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            settings = {**group, "params": [names.get(parameter, "a stranger") for parameter in group["params"]]}
            yield from ((f"group {number}:{key}", OPTIMIZER, value) for key, value in settings.items())
            for parameter in group["params"]:
                if parameter in own:
                    state = optimizer.state.get(parameter, {})  # indexing would make an entry
                    for key, value in {"entries": sorted(state), **state}.items():
                        yield f"{names[parameter]}:{key}", OPTIMIZER, value


def _tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Parameters, and the buffers that are saved; names lose the prefix that a LightningModule gives to its network."""
    saved = module.state_dict().keys()
    yield from ((_plain(name, module), PARAMETERS, parameter) for name, parameter in module.named_parameters())
    yield from ((_plain(name, module), BUFFERS, buffer) for name, buffer in module.named_buffers() if name in saved)


def _plain(name: str, module: nn.Module) -> str:
    return name.removeprefix("network.") if isinstance(module, L.LightningModule) else name


def _state(values: Iterable[tuple[str, str, Any]], *, with_statistics: bool) -> State:
    """The tensors by name; without running statistics, where replicas have their own."""
    found: State = {}
    for name, kind, value in values:
        # All replicas count batches alike; only averages over samples are a replica's own.
        if with_statistics or kind != BUFFERS or not value.is_floating_point():
            divided = _divided(value)
            found[f"{name} ({kind})"] = f"part {divided[0]}" if divided else "", short_digest(value)
    return found


def metrics_state(metrics: Mapping[str, Tensor]) -> State:
    """A process's values of the run's metrics, without those that each process has of its own."""
    shared = [name for name in metrics if is_shared(name)]
    return {f"{name} ({METRICS})": ("", short_digest(float(metrics[name]))) for name in shared}


def is_shared(metric: str) -> bool:
    """Whether a logged metric is of the whole run, neither of a process's share of a step, nor of the clock."""
    return not metric.endswith(("_step", "_per_s"))


def short_digest(value: Any) -> str:
    """Eight hexadecimal digits of the local part's bytes: a flipped bit changes them."""
    content: Any
    if not isinstance(value, Tensor):
        content = repr(value).encode()
    else:  # of a tensor torch would print thousands of views, and in one of some thirty runs it failed to make them
        content = local_part(value.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{zlib.crc32(content):08x}"
