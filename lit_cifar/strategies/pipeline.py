"""A step of `pp`: one replica of a network as a pipeline of processes, from a batch to gradients for Lightning.

`Pipeline.training_step` is the step from top to bottom. Microbatches of one size are trained by torch's schedules,
whose messages have a fixed size. Others, of a last batch that is not full and of evaluations, are passed on here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from lit_cifar.data.images import Batch
from lit_cifar.errors import ConfigError
from lit_cifar.mode import NoRecorder, WorkKind
from lit_cifar.models.compiled import Compiled
from lit_cifar.models.memory_format import Plain
from lit_cifar.models.partition import Partition
from lit_cifar.models.random_streams import draw_for_part, draw_for_stage, know_stages
from lit_cifar.strategies.base import RunsNetwork
from lit_cifar.strategies.mesh import loss_scale
from lit_cifar.strategies.parts import Microbatches, VirtualParts

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B"]  # as `get_schedule_class` knows them
Passed = dict[int, tuple[Tensor, Tensor]]  # input and output of each stage of a process, for one microbatch


@dataclass(frozen=True)
class EqualMicrobatches:
    """Cuts a batch into `count` microbatches of about one size. `VirtualParts` takes its place for virtual replicas."""

    count: int

    def microbatches_of(self, batch: Batch) -> Microbatches:
        """Images and targets of `batch`; the size of each microbatch and the weight of its loss."""
        sizes = [len(labels) for labels in batch.labels.tensor_split(self.count)]
        return batch.images, batch.targets, sizes, [batch.weight] * len(sizes)

    def share_of_loss(self, losses: Tensor, batch_size: int) -> Tensor:
        """The share of a microbatch in the mean loss of a batch, from the loss of each of its samples, (n,)."""
        return losses.sum() / batch_size

    def outputs_for_module(self, logits: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        """What the module receives each time that it asks for logits: those of the batch."""
        return [logits]

    def number_in_batch(self, microbatch: int) -> int:
        """The number of the random streams from which a microbatch draws."""
        return microbatch

    def start_step(self, buffers: Iterable[Tensor]) -> None:
        """Get ready for the forward of all microbatches, which will move `buffers`."""

    def own_statistics(self, buffers: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Return a context for the forward of a microbatch: it moves `buffers` on from the one before."""
        return nullcontext()


@dataclass(eq=False)
class Pipeline:
    """This process's stages of a network; images, labels and returned logits are the same in all of its pipeline."""

    module: RunsNetwork
    partition: Partition
    _: KW_ONLY
    schedule: ScheduleName
    owners: list[int]  # the process of the pipeline that holds each stage
    microbatches: EqualMicrobatches | VirtualParts
    group: dist.ProcessGroup  # the processes of the pipeline
    device: torch.device
    precision: Precision
    compiles: bool  # whether each stage is compiled by itself
    recorder: NoRecorder  # receives the stages' reports of their work

    def __post_init__(self) -> None:
        self._last = len(self.owners) - 1
        stages = self.partition.modules(self.module.network)
        know_stages(stages)
        self.stages = {
            # Layers in channels_last return outputs and gradients in that format; the receiver expects the plain one.
            index: nn.Sequential(Plain(), *stage, Plain())
            for index, stage in enumerate(stages)
            if self.owners[index] == dist.get_rank(self.group)
        }
        self.parameters = [parameter for stage in self.stages.values() for parameter in stage.parameters()]
        self._compiled = {index: Compiled(stage) for index, stage in self.stages.items() if self.compiles}
        self._outputs: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}
        self._torchs_schedule = cache(self._make_torchs_schedule)
        # Factors of the loss of the microbatch that the last stage works on.
        self._batch_size, self._weight = 1, 1.0
        self._scale: Tensor | float = 1.0

    def buffers(self) -> Iterator[Tensor]:
        return (buffer for stage in self.stages.values() for buffer in stage.buffers())

    def training_step(
        self, batch: Batch, own_step: Callable[[], Any], *, num_accumulated: int, checks_loss: bool
    ) -> Tensor:
        """Run forward and backward of all microbatches, then the module's `own_step` on their logits; return its loss.

        The backward of that gives Lightning the gradients. Those of earlier batches of a step (`num_accumulated`) stay.

        Raises:
            ConfigError: The module passes its batch twice; with `checks_loss`, also for another loss or other images.
        """
        # A scaler multiplies the loss when backward has been run here, and Lightning divides it.
        self._scale = loss_scale(self.precision, self.device) / num_accumulated
        images, labels, sizes, weights = self.microbatches.microbatches_of(batch)
        self._batch_size = len(images)
        self.microbatches.start_step(self.buffers())
        with self.precision.train_step_context():
            logits, gradients = self._forward_and_backward(images, labels, sizes, weights)
        outputs = self.microbatches.outputs_for_module(logits, sizes)
        answers = zip(torch.split(images, [len(each) for each in outputs]), outputs, strict=True)

        def answer(given: Tensor) -> Tensor:
            for own, logits in answers:
                if not checks_loss or (given.shape == own.shape and given.allclose(own, 0, 0, equal_nan=True)):
                    return logits
            problem = "training_step passes other images than its batch's through the network, or those twice"
            raise ConfigError(problem, remedy="change them in on_after_batch_transfer, or pass --trainer.strategy=ddp")

        self.module.use_forward_fn(answer)
        loss: Tensor = own_step()
        self.module.use_forward_fn(self.evaluate)
        if checks_loss or loss.requires_grad:
            self._check_loss(loss, outputs[-1], labels, weights[-1])
        loss.requires_grad_()  # Lightning's backward needs it, even for a stage without parameters
        with_gradients: Tensor = PrecomputedGradients.apply(loss, gradients, self._scale, *self.parameters)
        return with_gradients

    def _forward_and_backward(
        self, images: Tensor, labels: Tensor, sizes: list[int], weights: list[float]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The logits (n, C), without a graph, and the gradients of `parameters`, which are not left there.

        Microbatch i holds the next `sizes[i]` images; its loss has the factors `weights[i]` and `_scale`.
        """
        accumulated = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if len(set(sizes)) == 1:
            self._weight = weights[0]
            schedule = self._torchs_schedule(sizes[0], images.shape[1:], images.dtype)
            inputs = (images,) if 0 in self.stages else ()
            targets = {"target": labels} if self._last in self.stages else {}
            logits = schedule.step(*inputs, **targets)
        else:
            logits = self._train_unequal(torch.split(images, sizes), torch.split(labels, sizes), weights)
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, accumulated, strict=True):
            parameter.grad = gradient
        return self._from_last(logits.detach() if logits is not None else None, images), gradients

    def _make_torchs_schedule(self, num_samples: int, image_shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        images = torch.empty(num_samples, *image_shape, dtype=dtype, device=self.device)
        # Given all shapes, torch makes no trial run to infer them, which would move BatchNorm's running statistics.
        stages: list[Any] = [
            ScheduledStage(
                self._callable(index, num_samples),
                index,
                len(self.owners),
                self.device,
                input_args=self._boundary(index, images).requires_grad_() if index else images,
                output_args=self._boundary(index + 1, images).requires_grad_(),
                group=self.group,
                pipeline=self,
            )
            for index in self.stages
        ]
        kind: Any = get_schedule_class(self.schedule)
        one_or_all = stages if len(stages) > 1 else stages[0]
        return kind(one_or_all, self.microbatches.count, loss_fn=self._scaled_loss, scale_grads=False)

    def _train_unequal(self, images: Sequence[Tensor], labels: Sequence[Tensor], weights: list[float]) -> Tensor | None:
        """Run forward of all, then backward of all, as in GPipe; return the logits if the last stage is here."""
        passed = [self._forward(piece, number, trains=True) for number, piece in enumerate(images)]
        for number, weight in enumerate(weights):
            self._weight = weight
            self._backward(passed[number], labels[number], number)
        return torch.cat([each[self._last][1] for each in passed]) if self._last in self.stages else None

    def _forward(self, images: Tensor, microbatch: int, *, trains: bool = False) -> Passed:
        passed: Passed = {}
        for index in self.stages:
            given = images
            if index > 0:
                given = self._boundary(index, images)
                dist.recv(given, group=self.group, group_src=self.owners[index - 1])
                given.requires_grad_(trains)
            with self.forward_context(index, microbatch, trains=trains):
                output = self._callable(index, len(images))(given)
            passed[index] = given, output
            if index != self._last:
                dist.send(output.detach().contiguous(), group=self.group, group_dst=self.owners[index + 1])
        return passed

    def _backward(self, passed: Passed, labels: Tensor, microbatch: int) -> None:
        for index, (given, output) in reversed(passed.items()):
            grad = None
            if index == self._last:
                output = self._scaled_loss(output, labels)
            else:
                grad = torch.empty_like(output)
                dist.recv(grad, group=self.group, group_src=self.owners[index + 1])
            with self.work_context("backward", index, microbatch):
                if output.requires_grad:  # nothing may be trained in the first stages
                    output.backward(grad)  # type: ignore[no-untyped-call]
            if index > 0:
                assert given.grad is not None
                dist.send(given.grad.contiguous(), group=self.group, group_dst=self.owners[index - 1])

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        share = self.microbatches.share_of_loss(self.module.loss(logits, labels), self._batch_size)
        return share * self._weight * self._scale

    def _check_loss(self, loss: Tensor, logits: Tensor, labels: Tensor, weight: float) -> None:
        """Raise a `ConfigError` unless `loss`, of the last samples, is the one by which the pipeline has trained."""
        with self.precision.train_step_context():
            trained = self.module.loss(logits, labels[-len(logits) :]).mean() * weight
        if loss.requires_grad or not torch.allclose(loss.double(), trained.double(), rtol=1e-3, equal_nan=True):
            problem = "training_step returns another loss than the mean of loss(): a pipeline trains by loss() alone"
            raise ConfigError(problem, remedy="compute it in loss(), or pass --trainer.strategy=ddp")

    def evaluate(self, images: Tensor) -> Tensor:
        """Logits (n, C) of images (n, ...), any n; microbatches follow each other through the stages."""
        if not len(images):
            return images.new_empty(0, *self.partition.stages[-1][-1].output_shape)
        pieces = [piece for piece in images.tensor_split(self.microbatches.count) if len(piece)]
        ends = (self._forward(piece, number).get(self._last) for number, piece in enumerate(pieces))
        outputs = [end[1] for end in ends if end is not None]
        return self._from_last(torch.cat(outputs) if outputs else None, images)

    @contextmanager
    def forward_context(self, stage: int, microbatch: int, *, trains: bool = True) -> Iterator[None]:
        """Return a context for the forward of a microbatch, which has random streams and, in training, statistics."""
        moved = self.stages[stage].buffers() if trains else ()
        draw_for_part(self.microbatches.number_in_batch(microbatch))
        draw_for_stage(stage)
        with self.work_context("forward", stage, microbatch), self.microbatches.own_statistics(moved):
            yield

    @contextmanager
    def work_context(self, kind: WorkKind, stage: int, microbatch: int) -> Iterator[None]:
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
        dist.broadcast(logits, group=self.group, group_src=self.owners[self._last])
        return logits

    def _boundary(self, index: int, images: Tensor) -> Tensor:
        """An empty tensor for the input of stage `index`, from the stage before it, for these images."""
        key = images.shape[1:], images.dtype, torch.is_autocast_enabled(self.device.type)
        if key not in self._outputs:
            self._outputs[key] = self.partition.outputs(self.module.network, images)
        shape, dtype = self._outputs[key][index - 1]
        return torch.empty(len(images), *shape, dtype=dtype, device=self.device)


class ScheduledStage(PipelineStage):
    """torch's stage, recorded, with random streams and statistics of each microbatch's own."""

    def __init__(self, *args: Any, pipeline: Pipeline, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pipeline = pipeline

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._pipeline.forward_context(self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._pipeline.work_context("backward", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


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
