"""One replica of a network as a pipeline of processes, and the order in which these work.

Microbatches of one size are trained by torch's schedules, whose messages have a fixed size. Others, of a last batch
that is not full, are passed from stage to stage here, and so is every batch of an evaluation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.func import functional_call

from lit_cifar import internals
from lit_cifar.errors import ConfigError
from lit_cifar.mode import NoRecorder, WorkKind
from lit_cifar.models.blocks import Partition
from lit_cifar.models.compiled import Compiled
from lit_cifar.models.memory_format import PlainGradient, PlainOutput
from lit_cifar.models.random_streams import begin_part, begin_stage
from lit_cifar.strategies.parts import Parts, WholeBatch

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
Passed = dict[int, tuple[Tensor, Tensor]]  # input and output of each stage of a process, for one microbatch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Order in which the processes of a pipeline work on stages and microbatches: one of torch's, with its rules."""

    name: ScheduleName  # torch's name (torch.distributed.pipelining.schedules.get_schedule_class)
    num_processes: int  # processes of one pipeline

    @property
    def num_stages(self) -> int:
        return self.num_processes * stages_per_process(self.name)

    def owner(self, stage: int) -> int:
        """The process of the pipeline that holds `stage`: in turn, or there and back where the schedule is a V."""
        turn, place = divmod(stage, self.num_processes)
        return self.num_processes - 1 - place if self.name == "ZBVZeroBubble" and turn % 2 else place

    @property
    def fewest_microbatches(self) -> int:
        processes = self.num_processes
        return {"GPipe": 1, "ZBVZeroBubble": 2 * processes - 1}.get(self.name, processes)

    def check(self, num_microbatches: int) -> None:
        """Raise a `ConfigError` unless the schedule works with `num_microbatches`."""
        name = f"the schedule {self.name} over {self.num_processes} processes"
        if num_microbatches < (fewest := self.fewest_microbatches):
            raise ConfigError(
                f"{name} needs at least {fewest} microbatches, not {num_microbatches}",
                remedy=f"pass --trainer.strategy.num_microbatches={fewest} or more",
            )
        rounds = max(1, num_microbatches // self.num_processes)
        if self.name == "Interleaved1F1B" and num_microbatches % rounds:
            raise ConfigError(
                f"{name} runs {num_microbatches} microbatches in {rounds} rounds, which does not come out even",
                remedy=f"pass --trainer.strategy.num_microbatches={rounds * self.num_processes}",
            )

    def check_parts(self, parts: Parts, *, asked: int | None) -> None:
        """Raise a `ConfigError` unless `parts` can be the microbatches, whose number the user may have `asked` for."""
        name = f"--virtual_replicas={parts.num_parts}"
        if self.name == "ZBVZeroBubble":
            raise ConfigError(
                f"{name} with the schedule ZBVZeroBubble, which computes the gradients of a microbatch in two pieces",
                remedy="pass --trainer.strategy.schedule=1F1B",
            )
        if asked not in (None, parts.count):
            raise ConfigError(
                f"{name} cuts the batch of a pipeline into {parts.count} microbatches, not {asked}",
                remedy=f"pass --trainer.strategy.num_microbatches={parts.count}, or leave it out",
            )
        if parts.count < (fewest := self.fewest_microbatches):
            num_pipelines = parts.num_parts // parts.count
            raise ConfigError(
                f"{name} cuts the batch of a pipeline into {parts.count} microbatches, and the schedule {self.name} "
                f"over {self.num_processes} processes needs {fewest}",
                remedy=f"pass --virtual_replicas={num_pipelines << (fewest - 1).bit_length()}",
            )
        self.check(parts.count)


def stages_per_process(name: ScheduleName) -> int:
    return 2 if name in ("Interleaved1F1B", "ZBVZeroBubble") else 1


@dataclass(eq=False)
class Pipeline:
    """This process's stages of a network, and how they work together with those of the other processes.

    Images, labels and the returned logits are the same in all processes of the pipeline.
    """

    network: nn.Module
    partition: Partition
    _: KW_ONLY
    schedule: Schedule
    num_microbatches: int
    loss: Callable[[Tensor, Tensor], Tensor]  # loss of each sample, (n,), from logits (n, C) and labels (n,)
    group: dist.ProcessGroup  # the processes in the order of the stages
    device: torch.device
    compiles: bool = False  # whether each stage is compiled by itself
    recorder: NoRecorder = field(default_factory=NoRecorder)  # receives the stages' reports of their work
    parts: WholeBatch = field(default_factory=WholeBatch)  # microbatches, with their own mean loss and statistics

    def __post_init__(self) -> None:
        self._rank = dist.get_rank(self.group)
        self._last = self.schedule.num_stages - 1
        self.stages = {
            # Layers in channels_last return outputs and gradients in that format; the receiver expects the plain one.
            index: nn.Sequential(PlainGradient(), *stage.module(self.network), PlainOutput())
            for index, stage in enumerate(self.partition.stages)
            if self._peer(index) is None
        }
        self._compiled = {index: Compiled(stage) for index, stage in self.stages.items() if self.compiles}
        self._narrow = cache(partial(output_dtypes, self.network, self.partition, device=self.device))
        self._prepared = cache(self._prepare)
        self._shapes = cache(lambda image_shape: self.partition.shapes(self.network, image_shape))
        self._batch_size, self._weight = 1, 1.0
        self._scale: Tensor | float = 1.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for stage in self.stages.values() for parameter in stage.parameters()]

    def train(
        self, images: Tensor, labels: Tensor, *, sizes: list[int], weights: Sequence[float], scale: Tensor | float
    ) -> Tensor:
        """Run forward and backward of all microbatches; return the logits, (n, C), without a graph. Gradients add up.

        Microbatch i holds the next `sizes[i]` images; its loss has the factors `weights[i]` and `scale`.
        """
        self._batch_size, self._scale = len(images), scale
        if len(set(sizes)) == 1:
            self._weight = weights[0]
            run = self._prepared(sizes[0], images.shape[1:], images.dtype)
            inputs = (images,) if 0 in self.stages else ()
            targets = {"target": labels} if self._last in self.stages else {}
            logits = run.step(*inputs, **targets)
        else:
            logits = self._train_unequal(torch.split(images, sizes), torch.split(labels, sizes), weights)
        return self._from_last(logits.detach() if logits is not None else None, images)

    def _train_unequal(
        self, images: Sequence[Tensor], labels: Sequence[Tensor], weights: Sequence[float]
    ) -> Tensor | None:
        """Run forward of all, then backward of all, as in GPipe; return the logits if the last stage is here."""
        passed = [self._forward(piece, place, trains=True) for place, piece in enumerate(images)]
        for place, weight in enumerate(weights):
            self._weight = weight
            self._backward(passed[place], labels[place], place)
        return torch.cat([its[self._last][1] for its in passed]) if self._last in self.stages else None

    def evaluate(self, images: Tensor) -> Tensor:
        """Logits (n, C) of images (n, ...), any n; microbatches follow each other through the stages."""
        if not len(images):
            return images.new_empty(0, *self.partition.stages[-1].output_shape)
        pieces = [piece for piece in images.tensor_split(self.num_microbatches) if len(piece)]
        ends = (self._forward(piece, place).get(self._last) for place, piece in enumerate(pieces))
        outputs = [end[1] for end in ends if end is not None]
        return self._from_last(torch.cat(outputs) if outputs else None, images)

    def _peer(self, stage: int) -> int | None:
        """The process that holds `stage`; None for this one."""
        owner = self.schedule.owner(stage)
        return None if owner == self._rank else owner

    def _forward(self, images: Tensor, microbatch: int, *, trains: bool = False) -> Passed:
        """Run this process's stages on one microbatch."""
        passed: Passed = {}
        for index in self.stages:
            if index == 0:
                given = images
            elif (sender := self._peer(index - 1)) is None:
                given = passed[index - 1][1].detach()
            else:
                given = self._boundary(index, images)
                dist.recv(given, group=self.group, group_src=sender)
            given = given.requires_grad_() if trains and index > 0 else given
            with self.forward(index, microbatch, trains=trains):
                output = self._callable(index, len(images))(given)
            passed[index] = given, output
            if index != self._last and (receiver := self._peer(index + 1)) is not None:
                dist.send(output.detach().contiguous(), group=self.group, group_dst=receiver)
        return passed

    def _backward(self, passed: Passed, labels: Tensor, microbatch: int) -> None:
        """Run the backward of this process's stages on one microbatch."""
        for index, (given, output) in reversed(passed.items()):
            grad = None
            if index == self._last:
                output = self._scaled_loss(output, labels)
            elif (sender := self._peer(index + 1)) is None:
                grad = passed[index + 1][0].grad
            else:
                grad = torch.empty_like(output)
                dist.recv(grad, group=self.group, group_src=sender)
            with self.span("backward", index, microbatch):
                if output.requires_grad:  # nothing may be trained in the first stages
                    output.backward(grad)  # type: ignore[no-untyped-call]
            if index > 0 and (receiver := self._peer(index - 1)) is not None:
                assert given.grad is not None
                dist.send(given.grad.contiguous(), group=self.group, group_dst=receiver)

    @contextmanager
    def forward(self, stage: int, microbatch: int, *, trains: bool = True) -> Iterator[None]:
        """Return a context for the forward of a microbatch, which has random streams and, in training, statistics."""
        moved = self.stages[stage].buffers() if trains else ()
        begin_part(self.parts.place(microbatch))
        begin_stage(stage)
        with self.span("forward", stage, microbatch), self.parts.own_statistics(moved):
            yield

    @contextmanager
    def span(self, kind: WorkKind, stage: int, microbatch: int) -> Iterator[None]:
        """Return the recorder's context for a stage's work on a microbatch. Backward has the types of forward."""
        worker = f"process {dist.get_rank()}"
        types = nullcontext() if kind == "forward" else torch.autocast(self.device.type, enabled=False)
        what: dict[str, Any] = {"stage": stage, "microbatch": microbatch, "worker": worker, "device": self.device}
        with types, self.recorder.span(kind, **what):
            yield

    def _callable(self, index: int, num_samples: int) -> Any:
        return self._compiled[index].for_batch(num_samples) if self._compiled else self.stages[index]

    def _from_last(self, logits: Tensor | None, images: Tensor) -> Tensor:
        """The logits of the last stage for `images`, in every process."""
        if logits is None:
            logits = self._boundary(self._last + 1, images)
        logits = logits.contiguous()
        dist.broadcast(logits, group=self.group, group_src=self.schedule.owner(self._last))
        return logits

    def _boundary(self, index: int, images: Tensor) -> Tensor:
        """An empty tensor for the input of stage `index`, from the stage before it, for these images."""
        dtype, shape = images.dtype, self._shapes(images.shape[1:])[index - 1]
        if torch.is_autocast_enabled(self.device.type):  # then the dtype depends on the layers
            dtype = self._narrow(dtype)[index - 1]
        return torch.empty(len(images), *shape, dtype=dtype, device=self.device)

    def _prepare(self, num_samples: int, image_shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Torch's schedule for microbatches of this size."""
        images = torch.empty(num_samples, *image_shape, dtype=dtype, device=self.device)
        # Given all shapes, torch makes no trial run to infer them, which would move BatchNorm's running statistics.
        stages: list[Any] = [
            ScheduledStage(
                self._callable(index, num_samples),
                index,
                self.schedule.num_stages,
                self.device,
                input_args=self._boundary(index, images).requires_grad_() if index else images,
                output_args=self._boundary(index + 1, images).requires_grad_(),
                group=self.group,
                pipeline=self,
            )
            for index in self.stages
        ]
        kind: Any = get_schedule_class(self.schedule.name)
        one_or_all = stages if len(stages) > 1 else stages[0]
        return kind(one_or_all, self.num_microbatches, loss_fn=self._scaled_loss, scale_grads=False)

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.parts.reduced(self.loss(logits, labels), self._batch_size) * self._weight * self._scale


class ScheduledStage(PipelineStage):
    """torch's stage, recorded, with random streams and statistics of each microbatch's own."""

    def __init__(self, *args: Any, pipeline: Pipeline, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pipeline = pipeline

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._pipeline.forward(self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with self._pipeline.span("backward" if full_backward else "backward_input", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        with self._pipeline.span("backward_weight", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    # In torch 2.11 the first step exchanges a message between neighbouring stages, even if a V puts both on one
    # process; gloo cannot send to itself.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        torchs: Any = super()  # torch 2.15 no longer has this method
        operations: list[dist.P2POp] = torchs._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]


def output_dtypes(
    network: nn.Module, partition: Partition, dtype: torch.dtype, *, device: torch.device
) -> list[torch.dtype]:
    """Dtypes that the stages of `network` return for images of `dtype` in the present autocast state, not computed."""
    modules = partition.modules(network)
    # All tensors, also buffers that are not saved, and each once.
    states = [dict(module.named_parameters()) | dict(module.named_buffers()) for module in modules]
    found = []
    with internals.FakeTensorMode():
        x = torch.empty(2, *partition.image_shape, dtype=dtype, device=device)
        for module, state in zip(modules, states, strict=True):
            unreal = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in state.items()}
            x = functional_call(module, unreal, (x,))
            found.append(x.dtype)
    return found


class PrecomputedGradients(torch.autograd.Function):
    """A loss whose gradients are known already: backward returns them, times the gradient of the loss.

    Lightning runs training_step, zero_grad, backward, in this order; a pipeline's schedule runs backward within the
    step. So its gradients, times the `scale` by which Lightning will multiply the loss, wait for Lightning.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], scale: Tensor | float, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        factor = grad / ctx.scale
        return None, None, None, *(None if gradient is None else gradient * factor for gradient in ctx.gradients)
