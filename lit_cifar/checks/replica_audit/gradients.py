"""Each rank repeats its neighbour's batch: the gradients must be the same bit for bit.

An error in the arithmetic of one rank is in the average of the gradients, so replicas that compare their tensors never
see it. A repeat proves something only if the step depends on nothing else. So before a rank is blamed all repeat their
own batches, and only a rank that stands alone against a majority is blamed.
"""

import copy
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lit_cifar import internals
from lit_cifar.checks.repeated_step.attributes import Attributes, attributes_of, is_plain
from lit_cifar.checks.repeated_step.digests import Surroundings
from lit_cifar.checks.repeated_step.exchange import process_groups
from lit_cifar.checks.repeated_step.lightning_view import (
    TrainerView,
    detach,
    load_step_states,
    not_replayed,
    progress_of,
    step_states,
)
from lit_cifar.checks.repeated_step.tensors import fresh_copy
from lit_cifar.checks.repeated_step.twin import fill, one_process, what_cannot_be_judged
from lit_cifar.checks.replica_audit.replicas import Difference, device_digest, of_all_ranks, unlike

_PLACES = ("global_rank", "local_rank", "node_rank", "is_global_zero")  # attributes of the trainer that a step may read
_MOST_SUSPECTS = 4  # most ranks whose batches all ranks repeat
_EQUAL, _UNLIKE, _CANNOT = range(3)
Digests = dict[str, int]


def why_not_repeated(trainer: Trainer) -> str:
    """The reason why ranks cannot repeat each other's steps; "" if they can."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if not isinstance(strategy.model, DistributedDataParallel):
        return "the processes of a replica compute together"
    is_fixed = torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    if strategy.root_device.type != "cpu" and not is_fixed:
        return "a GPU may add in another order each time: pass deterministic=True to the trainer"
    if any("Sync" in type(layer).__name__ and isinstance(layer, internals.BatchNorm) for layer in module.modules()):
        return "synchronised BatchNorm exchanges data inside of a step"
    reasons = [*not_replayed(trainer), *what_cannot_be_judged(module, autocast="mixed" in str(trainer.precision))]
    return next(iter(reasons), "")


@dataclass
class Computation:
    """A call of `training_step` by one rank: all that decides gradients beside the parameters, and their digests."""

    rank: int
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    surroundings: Surroundings
    buffers: dict[str, Tensor]
    attributes: Attributes
    progress: dict[str, Any]
    loss_gradient: Tensor | None = None  # None with manual optimization
    gradients: dict[str, Tensor] = field(default_factory=dict)  # digest of each parameter's last gradient, by name


class NeighborAudit:
    """Writes down the next call of `training_step` after `observe`, and compares it after its backward pass."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.device = trainer.strategy.root_device
        self.own: Computation | None = None
        self.failure = ""  # the reason why the call could not be written down; "" if it could
        self._twin = _Twin(trainer, module)
        self._handles: list[Any] = []

    def observe(self) -> None:
        self.own, self.failure = None, ""
        real = self.module.training_step

        def observed(*args: Any, **kwargs: Any) -> Any:
            replaced.stop()
            what = type(self.module).__name__
            try:
                self._twin.refresh()
                what = "a batch"
                self._begin(args, kwargs)
            except Exception as error:  # a stranger's code: the training goes on
                self.failure = f"{what} cannot be copied: {error}"
            outputs = real(*args, **kwargs)
            self._end(outputs)
            return outputs

        replaced = patch.object(self.module, "training_step", observed)
        replaced.start()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.own = own = Computation(
            rank=self.trainer.global_rank,
            inputs=internals.tree_map(fresh_copy, (args, kwargs)),
            surroundings=Surroundings.now(self.device),
            buffers={name: buffer.detach().clone() for name, buffer in self.module.named_buffers()},
            attributes=Attributes.of(self.module),
            progress=progress_of(self.trainer) | {name: getattr(self.trainer, name) for name in _PLACES},
        )
        self._handles = [*_observed(self.module, own.gradients)]

    def _end(self, outputs: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if self.own is not None and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(partial(setattr, self.own, "loss_gradient"))  # type: ignore[no-untyped-call]

    def observed(self) -> Computation:
        """The observed call, whose first backward pass has ended."""
        assert self.own is not None
        own, self.own = self.own, None
        for handle in self._handles:
            handle.remove()
        return own

    def compare(self) -> tuple[list[Difference], str]:
        """Return each wrong gradient, and a reason if nothing was judged; a `failure` will recur in each step.

        Every rank must call this after the backward pass, and gets the same.
        """
        own = None if self.failure else self.observed()
        sent = _from_next(b"" if own is None else _to_bytes(own))
        others: list[int] = []
        if own is not None:
            self.failure, others = self._compared(sent)
        status = torch.tensor(_CANNOT if self.failure else _UNLIKE if others else _EQUAL, device=self.device)
        dist.all_reduce(status, op=dist.ReduceOp.MAX)
        if status == _EQUAL:
            return [], ""
        of_ranks = of_all_ranks((self.failure, others))
        if status == _CANNOT:
            self.failure = next(f"rank {rank}: {text}" for rank, (text, _) in enumerate(of_ranks) if text)
            return [], self.failure
        assert own is not None, "else the status is another"
        return self._judged(own, sorted({rank for _, others in of_ranks for rank in others}))

    def _compared(self, sent: bytes) -> tuple[str, list[int]]:
        """The reason why this rank cannot repeat a computation, and the ranks from whose gradients its own differ."""
        try:
            computation = _from_bytes(sent, self.device)
            return "", [computation.rank] * (self._twin.repeat(computation) != _numbers(computation.gradients))
        except Exception as error:  # a stranger's code: the training goes on
            return f"{type(error).__name__}: {error}".splitlines()[0], []

    def _judged(self, own: Computation, suspects: list[int]) -> tuple[list[Difference], str]:
        """Let all ranks repeat their own batches, and then those whose gradients were not the same twice."""
        first, again = _numbers(own.gradients), [self._repeated(own) for _ in range(2)]
        of_own = of_all_ranks((first, again))
        unable = [rank for rank, (once, others) in enumerate(of_own) if others != [once, once]]
        if len(unable) > 1 or any(repeat != others[0] for _, others in of_own for repeat in others):
            return [], f"rank {unable[0]} gets other gradients when it repeats its own batch"
        found: list[Difference] = []
        for suspect in unable or suspects[:_MOST_SUSPECTS]:
            sent = [_to_bytes(own) if suspect == own.rank else b""]
            dist.broadcast_object_list(sent, src=suspect)
            other = _from_bytes(sent[0], self.device)
            of_ranks = of_all_ranks(first if suspect == own.rank else self._repeated(other))
            ranks = [*range(len(of_ranks))]
            if len(ranks) == 2 and unable:  # the suspect may have been wrong once: its repeat is the third result
                ranks, of_ranks = [*ranks, suspect], [*of_ranks, of_own[suspect][1][0]]
            if other.attributes.unknown and any(one != of_ranks[0] for one in of_ranks):
                return [], f"{other.attributes.unknown[0]} of the module cannot be sent to another rank, and may differ"
            if (alone := who_stands_alone(of_ranks)) is None or (unable and alone != unable):
                return [], "no majority gets the same, so a rank computes wrongly, or a step depends on its rank"
            found += unlike(ranks, of_ranks)
        return [*dict.fromkeys(found)], ""

    def _repeated(self, computation: Computation) -> Digests:
        """The gradients of a repeat; empty if the code cannot be repeated after all."""
        try:
            return self._twin.repeat(computation)
        except Exception:  # a stranger's code may raise anything
            return {}


def who_stands_alone(of_ranks: Sequence[Digests]) -> list[int] | None:
    """Places whose digests nobody else has, while most agree; None if others than such places differ from most.

    Ranks that agree with one another and not with the majority are no fault of a processor: they compute by a different
    rule, or on processors of a different kind.
    """
    values = [frozenset(digests.items()) for digests in of_ranks]
    counted = Counter(values)
    common, number = counted.most_common(1)[0]
    others = [place for place, value in enumerate(values) if value != common]
    is_clear = 2 * number > len(values) and all(counted[values[place]] == 1 for place in others)
    return others if is_clear else None


class _Twin:
    """A copy of the module that shares its parameters' memory, and computes beside the training."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self._places: list[int] = []
        self._copy: Any = None

    def refresh(self) -> None:
        """Make the copy, the first time and where layers, parameters or attributes have been replaced."""
        places = [*map(id, self.module.modules()), *(parameter.data_ptr() for parameter in self.module.parameters())]
        places += [id(value) for _, value in attributes_of(self.module) if not is_plain(value)]
        if places == self._places:
            return
        self._places, self._copy = places, None
        memo: dict[int, Any] = {id(group): group for group in process_groups()}  # groups cannot be copied
        aliases: dict[Tensor, nn.Parameter] = {}
        for parameter in self.module.parameters():
            alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            aliases[parameter] = memo[id(parameter)] = alias
        self._copy = copy.deepcopy(self.module, memo)
        self._view = TrainerView(self.trainer, [_without_steps(one, aliases) for one in self.trainer.optimizers])
        detach(self._copy, self._view, self)

    def repeat(self, computation: Computation) -> Digests:
        """Repeat a computation. Return the digests of the gradients that this rank computes."""
        fill(self._copy, buffers=computation.buffers, attributes=computation.attributes)
        for parameter, alias in zip(self.module.parameters(), self._copy.parameters(), strict=True):
            alias._backward_hooks = copy.copy(parameter._backward_hooks)
        found: dict[str, Tensor] = {}
        handles = [*_observed(self._copy, found), *self._forgotten()]
        states = step_states(self.trainer)
        self._view.follow(computation.progress)
        args, kwargs = internals.tree_map(fresh_copy, computation.inputs)
        try:
            with one_process(_refused, lambda: computation.rank):
                with computation.surroundings.entered(self.trainer.strategy.root_device):
                    outputs = self._copy.training_step(*args, **kwargs)
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
                loss.backward(computation.loss_gradient)
        except _BackwardEnded:
            pass
        finally:
            load_step_states(self.trainer, states)
            for handle in handles:
                handle.remove()
        return _numbers(found)

    def _forgotten(self) -> Any:
        for parameter in self._copy.parameters():
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None))

    def backward_inside(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Stand in for `manual_backward`, and end the step: its first backward pass is compared."""
        (loss * self._view.loss_scale).backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        raise _BackwardEnded

    def step_inside(self, optimizer: Optimizer) -> None:
        """Stand in for a step, and do nothing."""


class _BackwardEnded(Exception):  # noqa: N818  # it is no error
    pass


def _refused(name: str, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"ranks exchange data inside of a step, by {name}")


def _without_steps(optimizer: Optimizer, aliases: Mapping[Tensor, nn.Parameter]) -> Optimizer:
    """A read-only copy of an optimizer, on which a module's calls in a step change nothing."""
    copied: Optimizer = object.__new__(type(optimizer))
    groups = [{**group, "params": [aliases.get(p, p) for p in group["params"]]} for group in optimizer.param_groups]
    vars(copied).update(vars(optimizer), param_groups=groups, state={}, zero_grad=lambda set_to_none=True: None)
    return copied


def _observed(module: nn.Module, found: dict[str, Tensor]) -> Any:
    """Yield hooks that put the digest of each parameter's gradient, before it is averaged, into `found`."""

    def note(name: str, gradient: Tensor) -> None:
        found[name] = device_digest(gradient)

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_hook(partial(note, name))  # type: ignore[no-untyped-call]


def _numbers(digests: Mapping[str, Tensor]) -> Digests:
    if not digests:
        return {}
    return dict(zip(digests, torch.stack([*digests.values()]).tolist(), strict=True))


def _to_bytes(computation: Computation) -> bytes:
    """A computation as bytes; empty if it cannot be sent."""
    file = io.BytesIO()
    try:
        torch.save(computation, file)
    except Exception:  # a stranger's class may raise anything
        return b""
    return file.getvalue()


def _from_bytes(sent: bytes, device: torch.device) -> Computation:
    """Load a computation. Batches may hold any objects; a rank of this very run has sent them."""
    if not sent:
        raise ValueError("a batch cannot be sent to another process")
    computation: Computation = torch.load(io.BytesIO(sent), map_location=device, weights_only=False)
    return computation


def _from_next(own: bytes) -> bytes:
    """Send `own` to the previous rank, and return the bytes of the next one."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")

    def moved(tensor: Tensor, size: int) -> Tensor:
        received = torch.empty(size, dtype=tensor.dtype, device=device)
        to_previous = dist.P2POp(dist.isend, tensor.to(device), (rank - 1) % num_ranks)
        for work in dist.batch_isend_irecv([to_previous, dist.P2POp(dist.irecv, received, (rank + 1) % num_ranks)]):
            work.wait()
        return received.cpu()

    size = int(moved(torch.tensor([len(own)]), 1))
    sent = moved(torch.frombuffer(bytearray(own or b"\0"), dtype=torch.uint8), max(size, 1))
    return sent.numpy().tobytes()[:size]
