"""`pp` and `ddp_pp`: the layers over processes, as a pipeline; with several pipelines, the batch over these."""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.mode import ForwardFn
from lit_cifar.mode.tensors import parameters_of
from lit_cifar.strategies.base import CutStrategy, compiles
from lit_cifar.strategies.mesh import AveragingStrategy, clip_by_whole_norm
from lit_cifar.strategies.parts import VirtualParts
from lit_cifar.strategies.pipeline import EqualMicrobatches, Pipeline, ScheduleName
from lit_cifar.strategies.state_dicts import whole_state


class PipelineStrategy(CutStrategy, AveragingStrategy):
    """Divides the network's stages over the processes of a pipeline, by torch.distributed.pipelining.

    The processes of one pipeline read the same samples and cut them into microbatches. The result equals one device
    that normalises each microbatch by itself and moves the running statistics once for each; with several pipelines,
    those of the first one are kept. The module computes loss and metrics from all logits, which the last stage sends.

    Each process has the whole network in host memory, at the start on its device too, and then its own stages there;
    the copies of the other stages are brought up to date for checkpoints and at the end.

    Args:
        num_stages: Stages of a pipeline; by default one for each process, or two under "Interleaved1F1B".
        num_microbatches: Pieces of a pipeline's part of the batch; by default 4, or the least that the schedule needs.
        schedule: The order of work: "GPipe" (Huang et al. 2019), "1F1B" (Narayanan et al. 2019), "Interleaved1F1B"
            (Narayanan et al. 2021). All compute the same.
    """

    pipeline: Pipeline  # this process's part of its pipeline; known from `setup` to `teardown`
    registered: ClassVar[dict[str, dict[str, Any]]] = {"pp": {}, "ddp_pp": {"num_stages": 2}}
    needs: ClassVar[list[str]] = [*CutStrategy.needs, "loss"]

    def __init__(
        self,
        num_stages: int | None = None,
        num_microbatches: int | None = None,
        schedule: ScheduleName = "1F1B",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_stages = num_stages
        self._num_microbatches = num_microbatches
        self.schedule_name: ScheduleName = schedule

    @property
    @override
    def model_parallel_size(self) -> int:
        return self.all_processes if self.num_stages is None else max(1, self.num_stages // self._stages_per_process)

    @property
    def strategy_name(self) -> str:  # type: ignore[override]  # the base class has a constant
        return "pp" if self.model_parallel_size == self.all_processes else "ddp_pp"

    @property
    def _stages_per_process(self) -> int:
        return 2 if self.schedule_name == "Interleaved1F1B" else 1

    @property
    def owners(self) -> list[int]:
        """The process of the pipeline that holds each stage: all in turn, once or twice."""
        return [*range(self.model_parallel_size)] * self._stages_per_process

    @property
    def _fewest_microbatches(self) -> int:
        return 1 if self.schedule_name == "GPipe" else self.model_parallel_size

    @property
    @override
    def num_microbatches(self) -> int:
        if self.virtual_parts is not None:
            return self.virtual_parts.count
        if self._num_microbatches is not None:
            return self._num_microbatches
        return max(4, self._fewest_microbatches)

    def check(self) -> None:
        each = self._stages_per_process
        if self.num_stages is not None and (self.num_stages < 1 or self.num_stages % each):
            problem = f"num_stages={self.num_stages}, but under {self.schedule_name} each process holds {each}"
            nearest = max(each**2, self.num_stages // each * each)  # two processes, if each holds two stages
            raise ConfigError(problem, remedy=f"pass --trainer.strategy.num_stages={nearest}")
        super().check()
        if self.all_processes % (each := self.model_parallel_size):
            problem = f"{self.all_processes} processes do not divide into pipelines of {each} processes"
            remedy = f"pass --trainer.devices={max(self.all_processes // each, 1) * each}, or other num_stages"
            raise ConfigError(problem, remedy=remedy)
        self._check_schedule(self.num_microbatches)

    def _check_schedule(self, num_microbatches: int, *, parts: VirtualParts | None = None) -> None:
        """Raise a `ConfigError` unless the schedule works with `num_microbatches`, which `parts` may prescribe."""
        num_processes, fewest = self.model_parallel_size, self._fewest_microbatches
        name = f"the schedule {self.schedule_name} over {num_processes} processes"
        if num_processes == 1 and self._stages_per_process > 1:
            raise ConfigError(f"{name}: a stage would send to its own", remedy="pass --trainer.strategy.schedule=1F1B")
        if num_microbatches < fewest:
            remedy = f"pass --trainer.strategy.num_microbatches={fewest} or more"
            if parts is not None:
                num_pipelines = parts.num_parts // parts.count
                remedy = f"pass --virtual_replicas={num_pipelines << (fewest - 1).bit_length()}"
            raise ConfigError(f"{name} needs at least {fewest} microbatches, not {num_microbatches}", remedy=remedy)
        rounds = max(1, num_microbatches // num_processes)
        if self.schedule_name == "Interleaved1F1B" and num_microbatches % rounds:
            problem = f"{name} runs {num_microbatches} microbatches in {rounds} rounds, which does not come out even"
            raise ConfigError(problem, remedy="pass --trainer.strategy.schedule=1F1B")

    def use_virtual_parts(self, parts: VirtualParts) -> None:
        """Let `parts` be the microbatches; refuse schedules and numbers of microbatches that do not allow it."""
        name = f"--virtual_replicas={parts.num_parts}"
        if self._num_microbatches not in (None, parts.count):
            problem = f"{name} cuts the batch of a pipeline into {parts.count} parts, not {self._num_microbatches}"
            raise ConfigError(problem, remedy=f"pass --trainer.strategy.num_microbatches={parts.count}")
        self._check_schedule(parts.count, parts=parts)
        super().use_virtual_parts(parts)

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        self.cut(len(self.owners))

    def split_lines(self) -> list[str]:
        return self.partition.table([f"process {owner}" for owner in self.owners])

    def make_forward_fn(self, network: nn.Module) -> ForwardFn:
        """Leave this process's stages on its device; the others go to host memory."""
        self.pipeline = Pipeline(
            self.module,
            self.partition,
            schedule=self.schedule_name,
            owners=self.owners,
            microbatches=self.virtual_parts or EqualMicrobatches(self.num_microbatches),
            group=self.model_group,
            device=self.root_device,
            precision=self.precision_plugin,
            compiles=compiles(self.lightning_module),
            recorder=self.recorder,
        )
        for index, stage in enumerate(self.partition.modules(network)):
            if index not in self.pipeline.stages:
                stage.cpu()
        return self.pipeline.evaluate

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self.lightning_module
        return self.pipeline.training_step(
            batch,
            partial(super().training_step, batch, *args, **kwargs),
            num_accumulated=module.trainer.accumulate_grad_batches,
            checks_loss=not any(args[:1]),  # in the first step of an epoch, or if its number is not told
        )

    @override
    def trained_elsewhere(self) -> set[Tensor]:
        stages = enumerate(self.partition.modules(self.module.network))
        others = [stage for index, stage in stages if index not in self.pipeline.stages]
        return {tensor for stage in others for tensor in (*stage.parameters(), *stage.buffers())}

    @override
    def trained_parameters(self) -> list[nn.Parameter]:
        return self.pipeline.parameters

    @override
    def local_buffers(self) -> Iterator[Tensor]:
        return self.pipeline.buffers()

    @override
    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_whole_norm(optimizer, clip_val, device=self.root_device, group=self.model_group)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole network, as one device would save it; every process must call this."""
        self._refresh_copies()
        return super().lightning_module_state_dict()

    def _refresh_copies(self) -> None:
        """Bring this process's copies of all stages up to date with their owners in the first pipeline."""
        for owner, tensor in self._owned_tensors(self.module.network):
            on_device = tensor.detach().to(self.root_device, memory_format=torch.contiguous_format)
            dist.broadcast(on_device, src=owner)
            tensor.detach().copy_(on_device)

    def _owned_tensors(self, network: nn.Module) -> Iterator[tuple[int, Tensor]]:
        """Every parameter and buffer with the process of the first pipeline that holds its stage."""
        for owner, stage in zip(self.owners, self.partition.modules(network), strict=True):
            for tensor in stage.state_dict(keep_vars=True).values():
                yield owner, tensor

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On the first process the state of all parameters, as one device would save it; every one must call this."""
        # Adagrad begins with a state of every parameter, but only this process's parameters are stepped here.
        own = self.part_of_state(super().optimizer_state(optimizer), optimizer)
        parts: Any = [None] * self.model_parallel_size if dist.get_rank(self.model_group) == 0 else None
        dist.gather_object(whole_state(own["state"]), parts, group=self.model_group, group_dst=0)
        merged = {index: entry for part in parts or () for index, entry in part.items()}
        return {**own, "state": dict(sorted(merged.items()))}

    @override
    def part_of_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        own = set(self.pipeline.parameters)
        indices = {index for index, parameter in enumerate(parameters_of(optimizer)) if parameter in own}
        return {**state, "state": {index: entry for index, entry in state["state"].items() if index in indices}}

    def teardown(self) -> None:
        if hasattr(self, "pipeline"):
            if not self._failed:
                self._refresh_copies()
            del self.pipeline
        super().teardown()
