"""How many bytes a process of each mode holds for training: from shapes and sizes, before the first step."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.batch_split import BatchSplit
from lit_cifar.bench.saved_bytes import saved_bytes
from lit_cifar.models.blocks import tensor_split_of
from lit_cifar.models.partition import Stage
from lit_cifar.module import LitResNet
from lit_cifar.strategies import PipelineStrategy, ShardedStrategy
from lit_cifar.strategies.fsdp import autocast_dtype
from lit_cifar.strategies.layer_parallel import StagedStrategy
from lit_cifar.strategies.mesh import MeshStrategy
from lit_cifar.strategies.pipeline_schedule import Schedule
from lit_cifar.strategies.sharding_cost import largest_part
from lit_cifar.strategies.tensor_parallel import split_dim


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a process holds for training; None for what was not counted or cannot be predicted."""

    parameters: int | None  # that it trains; its part of those that are shared out
    gradients: int | None
    optimizer_state: int | None
    activations: int | None  # the most that is kept for backward at any time
    buckets: int | None  # in which DDP sends gradients, beside the gradients themselves


def predict(module: LitResNet, strategy: Any, *, batch_size: int, accumulation: int = 1) -> Held:
    """What this process will hold; a sharded mode's largest part, which is that of rank 0.

    Args:
        module: Whose network is still whole.
        strategy: The Trainer's, to which the module has been connected and whose processes have met.
        batch_size: The global one.
        accumulation: Steps over which a batch is accumulated.
    """
    network = module.network
    num_bytes = next(network.parameters()).element_size()
    if isinstance(strategy, PipelineStrategy):
        trained = sum(stage.num_parameters for _, stage in _own_stages(strategy))
    elif isinstance(strategy, ShardedStrategy):
        trained = largest_part(network, num_replicas=strategy.num_replicas, each=strategy.processes_per_replica)
    else:
        trained = sum(parameter.numel() for parameter in network.parameters())
    trained *= num_bytes
    batch_split = BatchSplit.of(strategy)
    samples = -(-batch_size // (accumulation * batch_split.dp_size))
    return Held(
        parameters=trained,
        gradients=trained,
        optimizer_state=round(trained * state_per_parameter(module.make_optimizer)),
        activations=_activations(module, strategy, batch_split, samples),
        buckets=trained if _has_buckets(strategy) else 0,
    )


def _has_buckets(strategy: Any) -> bool:
    """Whether DDP copies gradients into memory of its own to send them."""
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, MeshStrategy):
        return False
    return not strategy._ddp_kwargs.get("gradient_as_bucket_view", False)


def state_per_parameter(make_optimizer: Callable[[Any], Optimizer]) -> float:
    """Bytes of an optimizer's state for each byte of the parameters, found with a small one."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = make_optimizer([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    return sum(value.nbytes for value in kept if value.shape == parameter.shape) / parameter.nbytes


# Activations ----------------------------------------------------------------------------------------------------------


def _activations(module: LitResNet, strategy: Any, batch_split: BatchSplit, samples: int) -> int | None:
    autocast = autocast_dtype(strategy.precision_plugin)
    gathered = isinstance(strategy, ShardedStrategy) and strategy.data_parallel_size != 1

    def kept(layers: nn.Module, shape: tuple[int, ...], num_samples: int, *, last: bool = True) -> int:
        loss = _loss_of(module) if last else None
        return saved_bytes(layers, loss, shape, num_samples=num_samples, autocast=autocast, gathered=gathered)

    if isinstance(strategy, PipelineStrategy):
        return _of_pipeline(module, strategy, samples, kept)
    network = module.network
    if isinstance(strategy, ShardedStrategy) and strategy.processes_per_replica > 1:
        network = tensor_part(network, strategy.processes_per_replica)
    num_pieces = batch_split.num_microbatches if isinstance(strategy, StagedStrategy) else batch_split.replicas_per_rank
    pieces = [len(piece) for piece in torch.arange(samples).tensor_split(num_pieces) if len(piece)]
    return sum(kept(network, module.image_shape, num_samples) for num_samples in pieces)


def _of_pipeline(module: LitResNet, strategy: PipelineStrategy, samples: int, kept: Callable[..., int]) -> int | None:
    found = 0
    stages = strategy.partition.stages
    for index, stage in _own_stages(strategy):
        in_flight = microbatches_in_flight(strategy.schedule, index, num_microbatches=strategy.num_microbatches)
        if in_flight is None:
            return None
        shape = stages[index - 1].output_shape if index else module.image_shape
        size = -(-samples // strategy.num_microbatches)
        found += in_flight * kept(stage.module(module.network), shape, size, last=index == len(stages) - 1)
        if index == 0:  # microbatches are views of the batch, all of whose images stay
            image_bytes = math.prod(shape) * next(module.network.parameters()).element_size()
            found += (samples - in_flight * size) * image_bytes
    return found


def microbatches_in_flight(schedule: Schedule, stage: int, *, num_microbatches: int) -> int | None:
    """Of how many microbatches a stage keeps activations at most; None for schedules with several stages a process.

    GPipe runs all forward passes first (Huang et al. 2019). In 1F1B stage s of S begins with S - s of them and then
    alternates (Narayanan et al. 2019).
    """
    match schedule.name:
        case "GPipe":
            return num_microbatches
        case "1F1B":
            return min(num_microbatches, schedule.num_stages - stage)
        case _:
            return None


def _own_stages(strategy: PipelineStrategy) -> Iterator[tuple[int, Stage]]:
    place = strategy.global_rank % strategy.processes_per_replica
    for index, stage in enumerate(strategy.partition.stages):
        if strategy.schedule.owner(index) == place:
            yield index, stage


def _loss_of(module: LitResNet) -> Callable[[Tensor], Tensor]:
    return lambda logits: module.loss(logits, torch.zeros(len(logits), dtype=torch.int64)).mean()


def tensor_part(network: nn.Module, num_parts: int) -> nn.Module:
    """A copy of `network` with one of `num_parts` parts of each layer that tensor parallelism splits."""
    part = copy.deepcopy(network)
    for name, kind in tensor_split_of(part).items():
        layer = part.get_submodule(name)
        for key, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            dim = split_dim(kind, tensor)
            if dim is not None:
                own = tensor.detach().chunk(num_parts, dim)[0].clone()
                setattr(layer, key, nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own)
        if kind == "head":
            layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].chunk(num_parts, -1)[0],))
    return part
