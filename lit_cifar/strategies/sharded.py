"""`fsdp2` and `tp`: every process holds a part of each parameter, its gradient and its optimizer state.

Along the mesh's "data" axis by FSDP2, `torch.distributed.fsdp.fully_shard`: a block's parameters are gathered before it
is used and dropped afterwards, and gradients arrive summed over the replicas and divided again. Along its "model" axis
by tensor parallelism, see `tensor_parallel`: a block is computed in parts, and its parameters are never gathered. Both
together are torch's documented composition of the two.
"""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Optimizer
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.models.blocks import blocks_of
from lit_cifar.models.compiled import Compiled
from lit_cifar.strategies.fsdp import OutsideInferenceMode, autocast_dtype, reduce_in_tree, shard, whole_blocks
from lit_cifar.strategies.mesh import MeshStrategy, local_part
from lit_cifar.strategies.network import Runner, RunsNetwork, check_untied, compiles
from lit_cifar.strategies.parts import Parts
from lit_cifar.strategies.sharding_cost import sharding_lines
from lit_cifar.strategies.state_dicts import full_optimizer_state, full_state, load_full_state, split_optimizer_state
from lit_cifar.strategies.sync_batchnorm import synchronise_along
from lit_cifar.strategies.tensor_parallel import check_divisible, split_tensors

# Their fused kernels have no sharding strategy for DTensors up to torch 2.15; those of Adam and AdamW have.
_NOT_FUSED = (SGD, Adagrad)


class ShardedStrategy(MeshStrategy):
    """Parameters in parts over the processes, along one or both axes of the mesh.

    Equal to one device that normalises each replica's part of the batch by itself, with the running statistics of the
    first replica; with synchronised BatchNorm, or along the "model" axis alone, to one device that sees the whole
    batch.

    From `setup` to `teardown` a split copy takes the place of the module's `network`, with the same names; then the
    network itself is back, with the trained values.

    Args:
        data_parallel_size: Replicas, over which FSDP2 shards; None for as many as the processes make.
        tensor_parallel_size: Processes that hold a replica together, each with a part of its tensors; None for as many
            as there are for each replica.
        **kwargs: As of `MeshStrategy`: `process_group_backend`, `timeout`, `start_method`.
    """

    def __init__(
        self, data_parallel_size: int | None = None, tensor_parallel_size: int | None = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.data_parallel_size = data_parallel_size
        self.tensor_parallel_size = tensor_parallel_size
        self.strategy_name = "tp" if data_parallel_size == 1 else "fsdp2"
        self._whole: nn.Module | None = None

    @property
    @override
    def processes_per_replica(self) -> int:
        if self.tensor_parallel_size is not None:
            return self.tensor_parallel_size
        return max(1, self._num_processes // (self.data_parallel_size or 1))

    @property
    def num_replicas(self) -> int:
        """Size of the "data" axis; known once the Trainer is made."""
        return self._num_processes // self.processes_per_replica

    @property
    def _num_processes(self) -> int:
        return self.num_nodes * self.num_processes

    @override
    def check(self) -> None:
        self._check_sizes()
        super().check()
        if self._layer_sync is not None and self.num_replicas == 1 < self._num_processes:
            rank_zero_warn(
                f"--trainer.sync_batchnorm=true has no effect on --trainer.strategy={self.strategy_name} with one "
                "replica: it sees the whole batch"
            )

    def _check_sizes(self) -> None:
        sizes = {"data": self.data_parallel_size, "tensor": self.tensor_parallel_size}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigError(
                    f"--trainer.strategy.{name}_parallel_size={size} is less than one",
                    remedy=f"pass --trainer.strategy.{name}_parallel_size=1 or more",
                )
        given = [size for size in sizes.values() if size is not None]
        if not given:
            raise ConfigError(
                "--trainer.strategy=ShardedStrategy finds one of its sizes from the other, and both are null",
                remedy="pass --trainer.strategy.tensor_parallel_size=1 or another size",
            )
        product = math.prod(given)
        if self._num_processes % product or (len(given) == 2 and product != self._num_processes):
            formula = " x ".join(f"{name}_parallel_size={size}" for name, size in sizes.items() if size is not None)
            verb = "is not" if len(given) == 2 else "does not divide"
            raise ConfigError(
                f"--trainer.strategy={self.strategy_name}: {formula} {verb} {self._num_processes} processes",
                remedy=f"pass --trainer.devices={product}, or other sizes",
            )

    @override
    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        network = cast(RunsNetwork, model).network
        if self.tensor_parallel_size != 1:
            check_divisible(network, self.processes_per_replica, self.num_replicas, strategy=self.strategy_name)
            check_untied(network, network.modules(), strategy=self.strategy_name, recurse=False)
        if self.data_parallel_size != 1:
            check_untied(network, (blocks_of(network) or {}).values(), strategy=self.strategy_name)
        if compiles(model) and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"--model.compile=true: the layers of --trainer.strategy={self.strategy_name} exchange their "
                "parameters for local parts and send messages while they run, which torch.compile cannot trace",
                remedy="leave it out, or use --trainer.strategy=fsdp2",
            )
        make_optimizer = getattr(model, "make_optimizer", None)
        if make_optimizer is not None:  # LitResNet's: known before any process has been started
            self._check_optimizer(make_optimizer(network.parameters()))

    @override
    def use_parts(self, parts: Parts | None) -> None:
        """Let FSDP2 reduce the gradients of `parts` in their tree; refuse where the bits would differ."""
        if parts is not None:
            self._check_bits(f"--virtual_replicas={parts.num_parts}")
        super().use_parts(parts)

    def _check_bits(self, name: str) -> None:
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"{name}: --trainer.strategy={self.strategy_name} divides sums inside layers, which then round by the "
                "number of processes",
                remedy="leave it out, or pass --trainer.strategy=fsdp2",
            )
        if self._num_processes == 1:
            raise ConfigError(
                f"{name}: FSDP2 on one process does not reduce gradients, but adds them one after the other",
                remedy="leave out --trainer.strategy, or pass --trainer.devices=2",
            )
        module = self.lightning_module
        if module is not None and not all(parameter.is_contiguous() for parameter in module.parameters()):
            raise ConfigError(
                f"{name} with --model.channels_last=true: FSDP2 keeps parameters in torch's own order, so that other "
                "kernels run",
                remedy="pass --model.channels_last=false, or --trainer.strategy=ddp",
            )

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """As Lightning does; any module's optimizers are looked at before the first step."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self._check_optimizer(optimizer)

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        if getattr(optimizer, "steps_matrices", False):
            raise ConfigError(
                f"--model.optimizer={type(optimizer).__name__} multiplies whole matrices, and "
                f"--trainer.strategy={self.strategy_name} gives each process parts of them",
                remedy="pass another optimizer, or --trainer.strategy=ddp",
            )
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if fused and isinstance(optimizer, _NOT_FUSED):
            name = type(optimizer).__name__
            raise ConfigError(
                f"--model.optimizer.fused=true: torch cannot step parts of tensors with a fused {name}, and "
                f"--trainer.strategy={self.strategy_name} makes such parts",
                remedy="pass --model.optimizer.fused=false, or --model.optimizer=AdamW, which can",
            )

    @override
    def make_runner(self, network: nn.Module) -> Runner:
        """Put a copy in the network's place, and leave each process its parts of it."""
        self._whole = network
        # `fully_shard` takes parameters in torch's own order alone; the activations follow the images.
        parts = deepcopy(network).to(memory_format=torch.contiguous_format)
        self._whole.cpu()
        # By what was asked for, not by the number of processes: one process takes the same path.
        if self.tensor_parallel_size != 1:
            split_tensors(parts, self.mesh["model"])
        synchronise_along(parts, self.data_group)
        if self.data_parallel_size != 1:
            shard(parts, self.mesh["data"], dtype=autocast_dtype(self.precision_plugin))
        if self.parts is not None:
            reduce_in_tree(parts, self.parts)
        if compiles(self.lightning_module):
            for block in whole_blocks(parts):  # without the hooks that gather its parameters
                block.forward = Compiled(block, block.forward)
        cast(RunsNetwork, self.lightning_module).network = parts
        return OutsideInferenceMode(parts)

    @override
    def share_of_norm(self, gradient: Tensor) -> float:
        if not isinstance(gradient, DTensor):
            return 1 / self.world_size
        sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
        num_parts = math.prod(size for placement, size in sizes if not placement.is_replicate())
        return num_parts / self.world_size

    def split_lines(self) -> list[str]:
        """What a process holds and what it sends, a line each."""
        module = cast(RunsNetwork, self.lightning_module)
        with self.precision_plugin.tensor_init_context():
            num_bytes = torch.get_default_dtype().itemsize
        return sharding_lines(
            module.network,
            module.image_shape,
            num_replicas=self.num_replicas,
            each=self.processes_per_replica,
            num_bytes=num_bytes,
        )

    @override
    def local_buffers(self) -> Iterator[Tensor]:
        return (local_part(buffer) for buffer in cast(RunsNetwork, self.lightning_module).network.buffers())

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors, as one device would save them; every process must call this."""
        self.use_first_buffers()
        assert self.lightning_module is not None
        return full_state(self.lightning_module)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this process's parts, if the network is already split."""
        assert self.lightning_module is not None
        load_full_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return full_optimizer_state(super().optimizer_state(optimizer))

    @override
    def part_of_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        return split_optimizer_state(state, optimizer)

    @override
    def teardown(self) -> None:
        if self._whole is not None:
            module = cast(RunsNetwork, self.lightning_module)
            if not self._failed:
                self.use_first_buffers()
                self._whole.load_state_dict(full_state(module.network))
            module.network = self._whole
            self._whole = None
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make `fsdp2` (every process a replica) and `tp` (one replica of all processes) known."""
        strategy_registry.register("fsdp2", cls, description="FSDP2's fully_shard over all processes", override=True)
        strategy_registry.register(
            "tp",
            cls,
            description="Tensor parallelism over all processes",
            override=True,
            data_parallel_size=1,
            tensor_parallel_size=None,
        )
