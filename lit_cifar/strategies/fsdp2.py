"""`fsdp2` and `tp`: every process holds a part of parameters, gradients and optimizer state.

FSDP2, `torch.distributed.fsdp.fully_shard`, divides them along the mesh's "data" axis: a block's parameters are
gathered before it is used and dropped afterwards, and gradients arrive summed over the replicas and divided again.
Tensor parallelism (`tp.py`) divides them along the "model" axis: a block is computed in parts, and never gathered.
"""

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, ClassVar, cast

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, Adagrad, Optimizer, Rprop
from typing_extensions import override

from lit_cifar import internals
from lit_cifar.errors import ConfigError
from lit_cifar.mode import ForwardFn
from lit_cifar.mode.refusals import refuse
from lit_cifar.mode.tensors import local_part, parameters_of
from lit_cifar.models.blocks import blocks_of, topmost
from lit_cifar.models.compiled import Compiled
from lit_cifar.strategies.base import check_untied, compiles, without_network
from lit_cifar.strategies.mesh import MeshStrategy, move_and_broadcast, send_as_one
from lit_cifar.strategies.parts import VirtualParts
from lit_cifar.strategies.state_dicts import divided_like, whole_state
from lit_cifar.strategies.tp import check_divisible, split_tensors
from lit_cifar.task.muon import MuonSGD


class ShardedStrategy(MeshStrategy):
    """Divides the parameters over all processes.

    The result of `fsdp2` equals one device that normalises each replica's part of the batch by itself, with the running
    statistics of the first; with synchronised BatchNorm, and under `tp`, one device that sees the whole batch.

    From `setup` to `teardown` a split copy with the same names stands for `network`, which then has the trained values.

    Args:
        splits_layers: Whether processes hold one replica, each a part of its layers (`tp`). Else FSDP2 shards replicas.
    """

    restore_checkpoint_after_setup = True  # the parts exist from then on
    registered: ClassVar[dict[str, dict[str, Any]]] = {"fsdp2": {}, "tp": {"splits_layers": True}}

    def __init__(self, splits_layers: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.splits_layers = splits_layers
        self.strategy_name = "tp" if splits_layers else "fsdp2"
        self._whole: nn.Module | None = None

    @property
    @override
    def model_parallel_size(self) -> int:
        return self.all_processes if self.splits_layers else 1

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        network = self.module.network
        if self.splits_layers:
            check_divisible(network, self.layout, strategy=self.strategy_name)
            check_untied(network, ([layer] for layer in network.modules()), strategy=self.strategy_name)
        else:
            blocks = [{*block.modules()} for block in (blocks_of(network) or {}).values()]
            others = {*network.modules()}.difference(*blocks)
            check_untied(network, [*blocks, others], strategy=self.strategy_name)
            if numbers := [name for name, its in network.named_parameters() if not its.ndim]:
                problem = f"{numbers[0]} is one number without a dimension, and --trainer.strategy=fsdp2 divides rows"
                raise ConfigError(problem, remedy="give it the shape (1,), or pass --trainer.strategy=ddp")

    def use_virtual_parts(self, parts: VirtualParts) -> None:
        super().use_virtual_parts(parts)
        name = f"--virtual_replicas={parts.num_parts}"
        if self.all_processes == 1:
            problem = f"{name}: FSDP2 on one process does not reduce gradients, but adds them one after the other"
            raise ConfigError(problem, remedy="leave out --trainer.strategy, or pass --trainer.devices=2")
        module = self.lightning_module
        if module is not None and not all(parameter.is_contiguous() for parameter in module.parameters()):
            problem = f"{name} with --model.channels_last=true: FSDP2 keeps parameters in torch's own order"
            raise ConfigError(problem, remedy="pass --model.channels_last=false, or --trainer.strategy=ddp")

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.check_optimizer(optimizer)

    @override
    def check_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, MuonSGD | Adafactor | Rprop):
            refuse("--model.optimizer=lit_cifar.MuonSGD", self, optimizer=type(optimizer).__name__)
        # These fused kernels have no sharding strategy for DTensors up to torch 2.15; those of Adam and AdamW have one.
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if fused and isinstance(optimizer, SGD | Adagrad):
            refuse("--model.optimizer.fused=true", self, optimizer=type(optimizer).__name__)

    def model_to_device(self) -> None:
        """Move all but the network, which may be too large for a device as a whole."""
        with without_network(self.module):
            super().model_to_device()

    def make_forward_fn(self, network: nn.Module) -> ForwardFn:
        """Put a copy in the network's place, and leave each process its parts of it; the whole stays on the host."""
        self._whole = network
        # Its parameters share the memory of the copy's until one is replaced or moved.
        same: Any = {id(whole): nn.Parameter(whole.detach(), whole.requires_grad) for whole in network.parameters()}
        self.module.network = parts = deepcopy(network, same)
        if self.splits_layers:
            split_tensors(parts, self.mesh["model"], self.root_device)
        else:
            shard(parts, self.mesh["data"], self.root_device, dtype=AUTOCAST.get(self.precision_plugin.precision))
        if compiles(self.lightning_module):  # the hooks that gather the parameters of a block stay outside
            modules = set(parts.modules())
            blocks = [block for block in (blocks_of(parts) or {}).values() if block in modules]
            for block in blocks or [parts]:
                block.forward = Compiled(block, block.forward)

        def run(images: Tensor) -> Tensor:
            if not torch.is_inference_mode_enabled():
                return cast(Tensor, parts(images))
            # Otherwise `fully_shard` would gather parameters into tensors that no later training step may use.
            with torch.inference_mode(False), torch.no_grad():
                return cast(Tensor, parts(images.clone()))

        return run

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, then copy the tensors that each process of a replica holds whole from the first of these processes.

        Each computes the gradients of these itself, and kernels of a GPU may round differently every time, which
        training enlarges. For a ResNet34 that sends 0.8 MB. Only the momentum of the first process counts.
        """
        output = super().optimizer_step(*args, **kwargs)
        held: Any = [*self.module.network.parameters(), *self.module.network.buffers()] if self.splits_layers else []
        whole = [local_part(its) for its in held if its.placements[0].is_replicate() and its.is_floating_point()]
        if whole:  # what `tp` does not split, but counts, which are exact
            with torch.no_grad():
                send_as_one(lambda flat: dist.broadcast(flat, group=self.model_group, group_src=0), whole)
        return output

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole tensors; every process must call this."""
        self.use_first_buffers()
        return whole_state(super().lightning_module_state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own, state = super().lightning_module_state_dict(), checkpoint["state_dict"]
        parts = {name: divided_like(value, own[name]) if name in own else value for name, value in state.items()}
        super().load_model_state_dict({"state_dict": parts}, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return whole_state(super().optimizer_state(optimizer))

    @override
    def part_of_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        parameters = parameters_of(optimizer)
        entries = {
            index: {name: divided_like(value, parameters[index]) for name, value in entry.items()}
            for index, entry in state["state"].items()
        }
        return {**state, "state": entries}

    def teardown(self) -> None:
        if self._whole is not None:
            if not self._failed:
                self.use_first_buffers()
                self._whole.load_state_dict(whole_state(self.module.network.state_dict()))
            self.module.network = self._whole
            self._whole = None
        super().teardown()


# The dtype in which autocast computes, by precision, and the layers that do. All others use parameters as they are.
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
NARROW = (internals.ConvNd, nn.Linear)


def shard(network: nn.Module, mesh: DeviceMesh, device: torch.device, *, dtype: torch.dtype | None = None) -> None:
    """Apply `fully_shard` in place: the network's blocks are gathered one at a time; without blocks, all of it at once.

    Blocks are moved to `device` with the values of the first process: only one block is there as a whole at a time.
    Convolutions and linear layers compute in `dtype`, and so are gathered in it, other layers of a block apart from
    them; gradients are summed in the parameters' own. A block with parameters beside its layers, such as a LayerScale,
    or in several layers, is gathered in their own types: autocast casts what layers take, as on one device.
    """
    reduce_dtype = None if dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    modules = set(network.modules())
    for block in (blocks_of(network) or {}).values():
        move_and_broadcast(block.parameters(), device)
        is_tied = len([*block.named_parameters(remove_duplicate=False)]) > len([*block.parameters()])
        layers = [layer for layer in block.modules() if [*layer.parameters()] and not [*layer.children()]]
        wide = [] if dtype is None or is_tied else [layer for layer in layers if not computes_narrow(layer)]
        if wide:
            fully_shard(wide, mesh=mesh)
        # A ResNet's stem and head are chains of layers, not modules of the network.
        rest = [module for module in topmost(block, modules) if module not in wide and [*module.parameters()]]
        if rest:
            own_policy = MixedPrecisionPolicy() if is_tied or has_parameters_beside_layers(block) else policy
            fully_shard(rest if len(rest) > 1 else rest[0], mesh=mesh, mp_policy=own_policy)
    others = (each for each in chain(network.parameters(), network.buffers()) if not isinstance(each, DTensor))
    move_and_broadcast(others, device)
    fully_shard(network, mesh=mesh)


def computes_narrow(layer: nn.Module) -> bool:
    """Whether autocast narrows all that a layer does with its parameters: a hook or a user's `forward` may do more."""
    is_plain = type(layer).forward.__module__.startswith("torch.") and not layer._forward_pre_hooks
    return isinstance(layer, NARROW) and is_plain


def has_parameters_beside_layers(block: nn.Module) -> bool:
    """Whether a module of modules holds some itself. Those of attention are of linear layers."""
    parts = (part for part in block.modules() if [*part.children()] and not isinstance(part, nn.MultiheadAttention))
    return any([*part.parameters(recurse=False)] for part in parts)
