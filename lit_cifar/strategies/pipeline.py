"""One replica of a network as a pipeline of processes.

Microbatches of one size are trained by torch's schedules, whose messages have a fixed size. Others, of a last batch
that is not full, are passed from stage to stage here, and so is every batch of an evaluation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.func import functional_call

from lit_cifar.models.compiled import Compiled
from lit_cifar.models.memory_format import PlainGradient, PlainOutput
from lit_cifar.models.partition import Partition
from lit_cifar.reporting.timeline import Kind, Recorder
from lit_cifar.strategies.pipeline_schedule import Schedule
from lit_cifar.strategies.random_streams import begin_part, begin_stage
from lit_cifar.strategies.same_bits.parts import WholeBatch

Loss = Callable[[Tensor, Tensor], Tensor]
Passed = dict[int, tuple[Tensor, Tensor]]  # what each stage of a process has got and returned of a microbatch


class Pipeline:
    """This process's stages of a network, and how they work together with those of the other processes.

    Images and labels are the same in all processes of the pipeline, and so are the logits that it returns. `loss` is
    that of each sample, from logits (n, C) and labels (n,). `group` has the processes in the order of the stages. If it
    `compiles` them, each stage is compiled by itself. The `recorder` is told which stage works when. With `parts` a
    microbatch is a part, with its own mean loss and running statistics.
    """

    def __init__(
        self,
        network: nn.Module,
        partition: Partition,
        *,
        schedule: Schedule,
        num_microbatches: int,
        loss: Loss,
        group: dist.ProcessGroup,
        device: torch.device,
        compiles: bool = False,
        recorder: Recorder | None = None,
        parts: WholeBatch | None = None,
    ) -> None:
        self.partition = partition
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.group = group
        self.device = device
        self._recorder = recorder or Recorder()
        self._parts = parts or WholeBatch()
        self._loss = loss
        self._rank = dist.get_rank(group)
        self.stages = {
            # Layers in channels_last return both so; what is sent must lie as the room that is kept for it elsewhere.
            index: nn.Sequential(PlainGradient(), *stage.module(network), PlainOutput())
            for index, stage in enumerate(partition.stages)
            if schedule.owner(index) == self._rank
        }
        self._compiled = {index: Compiled(stage) for index, stage in self.stages.items() if compiles}
        self._network = network
        self._dtypes_of: dict[torch.dtype, list[torch.dtype]] = {}
        self._runs: dict[tuple[int, torch.dtype], Any] = {}
        self._scale: Tensor | float = 1.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for stage in self.stages.values() for parameter in stage.parameters()]

    def train(self, images: Tensor, labels: Tensor, *, sizes: list[int], scales: Sequence[Tensor | float]) -> Tensor:
        """Run forward and backward of all microbatches; the logits, (n, C), without a graph. Gradients are added up.

        Of the images microbatch i has the next `sizes[i]`. `scales[i]` is a factor of the summed loss of its samples,
        or of its mean loss if it is a part.
        """
        if len(set(sizes)) == 1:
            self._scale = scales[0]
            run = self._prepared(sizes[0], images.dtype)
            inputs = (images,) if 0 in self.stages else ()
            targets = {"target": labels} if self._last in self.stages else {}
            logits = run.step(*inputs, **targets)
        else:
            logits = self._train_unequal(torch.split(images, sizes), torch.split(labels, sizes), scales)
        return self._from_last(logits.detach() if logits is not None else None, len(images), images.dtype)

    def _train_unequal(
        self, images: Sequence[Tensor], labels: Sequence[Tensor], scales: Sequence[Tensor | float]
    ) -> Tensor | None:
        """Forward of all, then backward of all, as in GPipe; the logits, if the last stage is here."""
        passed = [self._forward(piece, place, trains=True) for place, piece in enumerate(images)]
        for place, scale in enumerate(scales):
            self._scale = scale
            self._backward(passed[place], labels[place], place)
        return torch.cat([its[self._last][1] for its in passed]) if self._last in self.stages else None

    def evaluate(self, images: Tensor) -> Tensor:
        """Logits (n, C) of images (n, ...), any n; microbatches follow each other through the stages."""
        if not len(images):
            return images.new_empty(0, *self.partition.stages[-1].output_shape)
        pieces = [piece for piece in images.tensor_split(self.num_microbatches) if len(piece)]
        ends = (self._forward(piece, place).get(self._last) for place, piece in enumerate(pieces))
        outputs = [end[1] for end in ends if end is not None]
        return self._from_last(torch.cat(outputs) if outputs else None, len(images), images.dtype)

    @property
    def _last(self) -> int:
        return self.schedule.num_stages - 1

    def _is_here(self, stage: int) -> bool:
        return self.schedule.owner(stage) == self._rank

    def _forward(self, images: Tensor, microbatch: int, *, trains: bool = False) -> Passed:
        """Run this process's stages on one microbatch."""
        passed: Passed = {}
        for index in self.stages:
            if index == 0:
                given = images
            elif self._is_here(index - 1):
                given = passed[index - 1][1].detach()
            else:
                given = self._boundary(index, len(images), images.dtype)
                dist.recv(given, group=self.group, group_src=self.schedule.owner(index - 1))
            given = given.requires_grad_() if trains and index > 0 else given
            with self.forward(index, microbatch, trains=trains):
                output = self._callable(index, len(images))(given)
            passed[index] = given, output
            if index != self._last and not self._is_here(index + 1):
                sent = output.detach().contiguous()
                dist.send(sent, group=self.group, group_dst=self.schedule.owner(index + 1))
        return passed

    def _backward(self, passed: Passed, labels: Tensor, microbatch: int) -> None:
        """The same way back."""
        for index, (given, output) in reversed(passed.items()):
            grad = None
            if index == self._last:
                output = self._scaled_loss(output, labels)
            elif self._is_here(index + 1):
                grad = passed[index + 1][0].grad
            else:
                grad = torch.empty_like(output)
                dist.recv(grad, group=self.group, group_src=self.schedule.owner(index + 1))
            with self.span("backward", index, microbatch):
                output.backward(grad)  # type: ignore[no-untyped-call]
            if index > 0 and not self._is_here(index - 1):
                assert given.grad is not None
                dist.send(given.grad.contiguous(), group=self.group, group_dst=self.schedule.owner(index - 1))

    @contextmanager
    def forward(self, stage: int, microbatch: int, *, trains: bool = True) -> Iterator[None]:
        """Around the forward of a microbatch, which has random streams and in a training statistics of its own."""
        moved = self.stages[stage].buffers() if trains else ()
        begin_part(self._parts.place(microbatch))
        begin_stage(stage)
        with self.span("forward", stage, microbatch), self._parts.own_statistics(moved):
            yield

    def span(self, kind: Kind, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Around a stage's work on a microbatch, for the recorder."""
        worker = f"process {dist.get_rank()}"
        return self._recorder.span(kind, stage=stage, microbatch=microbatch, worker=worker, device=self.device)

    def _callable(self, index: int, num_samples: int) -> Any:
        """What runs stage `index` on so many samples."""
        return self._compiled[index].for_batch(num_samples) if self._compiled else self.stages[index]

    def _from_last(self, logits: Tensor | None, num_samples: int, dtype: torch.dtype) -> Tensor:
        """The logits of the last stage, in every process."""
        if logits is None:
            logits = self._boundary(self._last + 1, num_samples, dtype)
        logits = logits.contiguous()
        dist.broadcast(logits, group=self.group, group_src=self.schedule.owner(self._last))
        return logits

    def _boundary(self, index: int, num_samples: int, dtype: torch.dtype) -> Tensor:
        """Room for what stage `index` gets from the one before it."""
        shape = self.partition.stages[index - 1].output_shape
        return torch.empty(num_samples, *shape, dtype=self._dtypes(dtype)[index - 1], device=self.device)

    def _dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        """What each stage returns for images of `dtype`, which under autocast depends on its layers."""
        if not torch.is_autocast_enabled(self.device.type):
            return [dtype] * len(self.partition.stages)
        if dtype not in self._dtypes_of:
            self._dtypes_of[dtype] = output_dtypes(self._network, self.partition, dtype, device=self.device)
        return self._dtypes_of[dtype]

    def _prepared(self, num_samples: int, dtype: torch.dtype) -> Any:
        """The schedule for microbatches of this size."""
        key = (num_samples, dtype)
        if key not in self._runs:
            stages: Any = list(self._torch_stages(num_samples, dtype))
            kind: Any = get_schedule_class(self.schedule.name)
            self._runs[key] = kind(
                stages if len(stages) > 1 else stages[0],
                self.num_microbatches,
                loss_fn=self._scaled_loss,
                scale_grads=False,
            )
        return self._runs[key]

    def _torch_stages(self, num_samples: int, dtype: torch.dtype) -> Iterator[PipelineStage]:
        # With all shapes given torch makes no trial run to infer them, which would move BatchNorm's running statistics.
        for index in self.stages:
            images = torch.empty(num_samples, *self.partition.image_shape, dtype=dtype, device=self.device)
            yield Stage(
                self._callable(index, num_samples),
                index,
                self.schedule.num_stages,
                self.device,
                input_args=self._boundary(index, num_samples, dtype).requires_grad_() if index else images,
                output_args=self._boundary(index + 1, num_samples, dtype).requires_grad_(),
                group=self.group,
                pipeline=self,
            )

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._parts.reduced(self._loss(logits, labels)) * self._scale


class Stage(PipelineStage):
    """A stage that greets other processes only, and works as its `pipeline` does."""

    def __init__(self, *args: Any, pipeline: Pipeline, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pipeline = pipeline

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's, recorded, from the part's own random streams and statistics."""
        with self._pipeline.forward(self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """As torch's, recorded."""
        with self._pipeline.span("backward" if full_backward else "backward_input", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """As torch's, recorded."""
        with self._pipeline.span("backward_weight", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    # In torch 2.11 the first step exchanges a message between neighbouring stages, also where a V has both on one
    # process; gloo cannot send to itself.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        torchs: Any = super()  # torch 2.15 has it no more
        operations: list[dist.P2POp] = torchs._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]


def output_dtypes(
    network: nn.Module, partition: Partition, dtype: torch.dtype, *, device: torch.device
) -> list[torch.dtype]:
    """What each stage of `network` returns for images of `dtype`, here and now; found without computing anything."""
    modules = partition.modules(network)
    states = [module.state_dict() for module in modules]
    found = []
    with FakeTensorMode():
        x = torch.empty(2, *partition.image_shape, dtype=dtype, device=device)
        for module, state in zip(modules, states, strict=True):
            unreal = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in state.items()}
            x = functional_call(module, unreal, (x,))
            found.append(x.dtype)
    return found


class HandOver(torch.autograd.Function):
    """A loss whose gradients are known already: backward returns them, times the gradient of the loss.

    Lightning runs training_step, zero_grad, backward, in this order; a pipeline's schedule runs backward within the
    step. So its gradients are set aside, times the `scale` by which a gradient scaler will multiply the loss, and
    handed over to the parameters when Lightning asks for them.
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
