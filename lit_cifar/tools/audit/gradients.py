"""Each rank repeats its neighbour's batch: the gradients must be the same bit for bit.

An error in the arithmetic of one rank is in the average of the gradients, so replicas that compare what they hold never
see it.
"""

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lit_cifar.tools.audit.replicas import digest, unlike
from lit_cifar.tools.replay.digests import Surroundings
from lit_cifar.tools.replay.exchange import process_groups
from lit_cifar.tools.replay.lightning_view import TrainerView, detach, load_step_states, progress_of, step_states
from lit_cifar.tools.replay.recording import fresh_copy, plain_attributes
from lit_cifar.tools.replay.twin import fill, one_process, what_cannot_be_judged

_MOST_SUSPECTS = 4  # whose batches all ranks repeat
_EQUAL, _UNLIKE, _CANNOT = range(3)
Digests = dict[str, int]


def why_not_repeated(trainer: Trainer) -> str:
    """Why no rank can repeat what another one computes; "" if it can."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if not isinstance(strategy.model, DistributedDataParallel):
        return "the processes of a replica compute together"
    is_fixed = torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    if strategy.root_device.type != "cpu" and not is_fixed:
        return "a GPU may add in another order each time: pass deterministic=True to the trainer"
    if any("Sync" in type(layer).__name__ and isinstance(layer, _BatchNorm) for layer in module.modules()):
        return "synchronised BatchNorm exchanges data inside of a step"
    its: list[Any] = [strategy, *trainer.callbacks]  # type: ignore[attr-defined]
    reasons = [getattr(one, "not_replayed", "") for one in its]
    reasons += what_cannot_be_judged(module, autocast="mixed" in str(trainer.precision))
    return next(filter(None, reasons), "")


@dataclass
class Computation:
    """A call of `training_step` by one rank: what the gradients depend on beside the parameters, and their digests."""

    rank: int
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    surroundings: Surroundings
    buffers: dict[str, Tensor]
    attributes: dict[tuple[str, str], Any]
    progress: dict[str, Any]
    loss_gradient: Tensor | None = None  # None with manual optimization
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by parameter, the digest of the last one it got


class NeighborAudit:
    """Writes down the next call of `training_step` when it is told to, and compares it after its backward pass."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.device = trainer.strategy.root_device
        self.is_tried = False  # whether ranks have been seen to repeat their own
        self.own: Computation | None = None
        self.failure = ""  # why the call could not be written down; then there is none
        self._twin = _Twin(trainer, module)
        self._handles: list[Any] = []

    def observe(self) -> None:
        self.own, self.failure = None, ""
        try:
            self._twin.refresh()
        except Exception as error:  # of a stranger's module: the training goes on
            self.failure = f"{type(self.module).__name__} cannot be copied: {error}"
        real = self.module.training_step

        def observed(*args: Any, **kwargs: Any) -> Any:
            replaced.stop()
            try:
                if not self.failure:
                    self._begin(args, kwargs)
            except Exception as error:  # of a stranger's batch
                self.failure = f"a batch cannot be copied: {error}"
            outputs = real(*args, **kwargs)
            self._end(outputs)
            return outputs

        replaced = patch.object(self.module, "training_step", observed)
        replaced.start()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.own = own = Computation(
            rank=self.trainer.global_rank,
            inputs=tree_map(fresh_copy, (args, kwargs)),
            surroundings=Surroundings.now(self.device),
            buffers={name: buffer.detach().clone() for name, buffer in self.module.named_buffers()},
            attributes=dict(plain_attributes(self.module)),
            progress=progress_of(self.trainer) | {"global_rank": self.trainer.global_rank},
        )
        self._handles = [*_observed(self.module, own.gradients)]

    def _end(self, outputs: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if self.own is not None and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(partial(setattr, self.own, "loss_gradient"))  # type: ignore[no-untyped-call]

    def observed(self) -> Computation:
        """The call and its first backward pass, which has ended."""
        assert self.own is not None
        own, self.own = self.own, None
        for handle in self._handles:
            handle.remove()
        return own

    def compare(self) -> tuple[list[str], str]:
        """After the backward pass: a line for each wrong gradient, and a reason why there is nothing to compare.

        Every rank must call this and gets the same.
        """
        own = None if self.failure else self.observed()
        sent = _from_next(b"" if own is None else _to_bytes(own))
        reason, others = (self.failure, []) if own is None else self._compared(own, sent)
        status = torch.tensor(_CANNOT if reason else _UNLIKE if others else _EQUAL, device=self.device)
        dist.all_reduce(status, op=dist.ReduceOp.MAX)
        first, self.is_tried = not self.is_tried, True
        if status == _EQUAL:
            return [], ""
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (reason, others))
        if status == _CANNOT:
            return [], next(f"rank {rank}: {text}" for rank, (text, _) in enumerate(of_ranks) if text)
        suspects = sorted({rank for _, others in of_ranks for rank in others})
        if first and len(suspects) == len(of_ranks):
            return [], "no rank gets those of another one, so one computes wrongly, or a step depends on its rank"
        assert own is not None, "else the status is another"
        return self._judged(own, suspects), ""

    def _compared(self, own: Computation, sent: bytes) -> tuple[str, list[int]]:
        """Why this rank cannot repeat a computation, and the ranks of which it gets other gradients.

        The first time it also repeats its own: some code cannot be repeated, and some kernels are not deterministic.
        """
        try:
            its = [_from_bytes(sent, self.device), *([] if self.is_tried else [own])]
            return "", [one.rank for one in its if self._twin.repeat(one) != _numbers(one.gradients)]
        except Exception as error:  # of a stranger's code: the training goes on
            return f"{type(error).__name__}: {error}".splitlines()[0], []

    def _judged(self, own: Computation, suspects: list[int]) -> list[str]:
        """All ranks repeat the batches whose gradients were not the same twice, and most are right."""
        lines: list[str] = []
        for suspect in suspects[:_MOST_SUSPECTS]:
            sent = [_to_bytes(own) if suspect == own.rank else b""]
            dist.broadcast_object_list(sent, src=suspect)
            repeated = self._twin.repeat(_from_bytes(sent[0], self.device))
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, (_numbers(own.gradients) if suspect == own.rank else repeated, repeated))
            ranks, found = [*range(len(of_ranks))], [first for first, _ in of_ranks]
            if len(ranks) == 2 and len(suspects) == 1:  # which may have been wrong once: it is the third
                ranks, found = [*ranks, suspect], [*found, of_ranks[suspect][1]]
            lines += unlike(ranks, found)
        return [*dict.fromkeys(lines)]


class _Twin:
    """A copy of the module that has its very parameters, and computes beside the training."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self._places: list[int] = []
        self._copy: Any = None

    def refresh(self) -> None:
        """Make it, the first time and where the parameters are others; not while the module is in a step."""
        places = [parameter.data_ptr() for parameter in self.module.parameters()]
        if places == self._places:
            return
        self._places, self._copy = places, None
        memo: dict[int, Any] = {id(group): group for group in process_groups()}  # which cannot be copied
        aliases: dict[Tensor, nn.Parameter] = {}
        for parameter in self.module.parameters():
            alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            aliases[parameter] = memo[id(parameter)] = alias
        self._copy = copy.deepcopy(self.module, memo)
        self._view = TrainerView(self.trainer, [_without_steps(its, aliases) for its in self.trainer.optimizers])
        detach(self._copy, self._view, self)

    def repeat(self, its: Computation) -> Digests:
        """The digests of the gradients that this rank computes."""
        fill(self._copy, buffers=its.buffers, attributes=its.attributes)
        for parameter, alias in zip(self.module.parameters(), self._copy.parameters(), strict=True):
            alias._backward_hooks = copy.copy(parameter._backward_hooks)
        found: dict[str, Tensor] = {}
        handles = [*_observed(self._copy, found), *self._forgotten()]
        states = step_states(self.trainer)
        self._view.follow(its.progress)
        args, kwargs = tree_map(fresh_copy, its.inputs)
        try:
            with one_process(_refused, lambda: its.rank):
                with its.surroundings.entered(self.trainer.strategy.root_device):
                    outputs = self._copy.training_step(*args, **kwargs)
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
                loss.backward(its.loss_gradient)
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
                yield parameter.register_post_accumulate_grad_hook(lambda its: setattr(its, "grad", None))

    def backward_inside(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of `manual_backward`: the first one of a step is compared."""
        (loss * self._view.loss_scale).backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        raise _BackwardEnded

    def step_inside(self, optimizer: Optimizer) -> None:
        """In place of a step."""


class _BackwardEnded(Exception):  # noqa: N818  # it is no error
    pass


def _refused(name: str, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"ranks exchange data inside of a step, by {name}")


def _without_steps(optimizer: Optimizer, aliases: Mapping[Tensor, nn.Parameter]) -> Optimizer:
    """To be read: what a module does with it in a step changes nothing."""
    its: Optimizer = object.__new__(type(optimizer))
    groups = [{**group, "params": [aliases.get(p, p) for p in group["params"]]} for group in optimizer.param_groups]
    vars(its).update(vars(optimizer), param_groups=groups, state={}, zero_grad=lambda set_to_none=True: None)
    return its


def _observed(module: nn.Module, found: dict[str, Tensor]) -> Any:
    """Hooks that put the digest of each parameter's gradient, before it is averaged, into `found`."""

    def note(name: str, gradient: Tensor) -> None:
        found[name] = digest(gradient)

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_hook(partial(note, name))  # type: ignore[no-untyped-call]


def _numbers(digests: Mapping[str, Tensor]) -> Digests:
    if not digests:
        return {}
    return dict(zip(digests, torch.stack([*digests.values()]).tolist(), strict=True))


def _to_bytes(its: Computation) -> bytes:
    """Empty if it cannot be sent."""
    file = io.BytesIO()
    try:
        torch.save(its, file)
    except Exception:  # of a stranger's class
        return b""
    return file.getvalue()


def _from_bytes(sent: bytes, device: torch.device) -> Computation:
    """Batches may hold any objects. A rank of this very run has sent them."""
    if not sent:
        raise ValueError("a batch cannot be sent to another process")
    its: Computation = torch.load(io.BytesIO(sent), map_location=device, weights_only=False)
    return its


def _from_next(own: bytes) -> bytes:
    """What the next rank sends; this one sends `own` to the one before it."""
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
