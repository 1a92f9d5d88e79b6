"""Base of the modes in which several processes hold one replica together: a 2-D mesh of the processes.

The first axis, "data", runs over replicas, the second, "model", over the processes that hold one replica. Process
`d * model_parallel_size + m` has the coordinates (d, m), so that those of a replica are mostly on one machine. They
read the same samples: collectives that count or average samples run along "data" only.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lit_cifar import internals
from lit_cifar.errors import ConfigError
from lit_cifar.mode.tensors import local_part, parameters_of
from lit_cifar.strategies.base import CustomForwardStrategy, check_gradient_hooks
from lit_cifar.task.refused_callbacks import refuse_averages


class MeshStrategy(CustomForwardStrategy, DDPStrategy):
    """Starts processes as Lightning's `ddp` does; several of them hold one replica.

    A subclass splits the network in `make_forward_fn`. `self.model` is the LightningModule: there is no wrapper, so the
    arguments of Lightning's `DDPStrategy` that configure its wrapper do not exist here.

    Args:
        process_group_backend: Backend of the process group; by default NCCL on GPUs and gloo on the CPU.
        timeout: Timeout of the process group and of the groups of both axes.
    """

    mesh: DeviceMesh  # its axes are "data" and "model"; known once the processes have met

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

    @property
    def all_processes(self) -> int:
        return self.num_nodes * self.num_processes

    def local_buffers(self) -> Iterator[Tensor]:
        """This process's parts of the running statistics."""
        return (local_part(buffer) for buffer in self.module.network.buffers())

    def part_of_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """The part of an optimizer's whole `state_dict()` that this process needs: all, where it is not divided."""
        return state

    @property
    @override
    def data_group(self) -> dist.ProcessGroup:
        """The processes that hold the same part of different replicas."""
        return self.mesh.get_group("data")

    @property
    def model_group(self) -> dist.ProcessGroup:
        """The processes that hold this process's replica."""
        return self.mesh.get_group("model")

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        each = self.model_parallel_size
        return {"num_replicas": self.all_processes // each, "rank": self.global_rank // each}

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        check_gradient_hooks(self.module.network, strategy=self.strategy_name)
        trained = {*self.module.network.parameters()}
        if others := [name for name, p in model.named_parameters() if p.requires_grad and p not in trained]:
            problem = f"{others[0]} is no part of the module's network, which {self.strategy_name} trains alone"
            raise ConfigError(problem, remedy="make it a part of the network, or pass --trainer.strategy=ddp")

    @override
    def on_train_start(self) -> None:
        """Refuse hooks that were added after `connect`, except those of virtual replicas."""
        layers = self.module.network.modules()
        self._has_own_buffers = any(its._buffers and not isinstance(its, internals.BatchNorm) for its in layers)
        accumulated = self.virtual_parts is None
        check_gradient_hooks(self.module.network, strategy=self.strategy_name, also_accumulated=accumulated)

    def setup_environment(self) -> None:
        super().setup_environment()
        self._failed = False
        self.mesh = make_mesh(self.root_device.type, model_size=self.model_parallel_size, timeout=self._timeout)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Set up like Lightning's `ddp`, with the forward function in place of the wrapper."""
        refuse_averages(trainer, self)
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.precision_plugin.convert_module(self.model)
        self.optimizers, self.lr_scheduler_configs = [], []
        self.model_to_device()
        self.module.use_forward_fn(self.make_forward_fn(self.module.network))
        self._count_along_data(self.data_group)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            self.precision_plugin.scaler.__class__ = AgreedGradScaler
        # Lightning leaves clipping to the precision plugin, which sees this process's gradients only.
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = _clip_grad_by_value  # type: ignore[method-assign]

    def model_to_device(self) -> None:
        """Move the module, and take the values of the first process."""
        super().model_to_device()
        internals.sync_module_states(self.model)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a step with the first replica's buffers, as `ddp` does: layers may use them, and BatchNorm does not."""
        trainer: Any = self.lightning_module and self.lightning_module.trainer
        if self._has_own_buffers and batch_idx % trainer.accumulate_grad_batches == 0:
            self.use_first_buffers()

    def use_first_buffers(self) -> None:
        """Take the running statistics of the first replica; every process must call this."""
        for buffer in self.local_buffers():
            dist.broadcast(buffer, group=self.data_group, group_src=0)

    # Each replica updates its own running statistics. When evaluation starts, all replicas take those of the first one.
    on_validation_start = on_test_start = on_predict_start = use_first_buffers

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = map(self.part_of_state, checkpoint["optimizer_states"], self.optimizers)
        super().load_optimizer_state_dict({"optimizer_states": [*states]})

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True  # communication with the other processes is no longer possible
        super().on_exception(exception)

    def teardown(self) -> None:
        if self.lightning_module is not None:
            self._count_along_data(None)
        super().teardown()

    def _count_along_data(self, group: dist.ProcessGroup | None) -> None:
        assert self.lightning_module is not None
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric):
                metric.process_group = group

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, group or self.data_group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group or self.data_group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """`torch.nn.utils.clip_grad_norm_`, to which the norm of DTensors, that of the whole, is still divided."""
        parameters = parameters_of(optimizer)
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(parameters, clip_val, whole)


class AveragingStrategy(MeshStrategy):
    """Averages the gradients of `trained_parameters` over the replicas by one all-reduce at the end of backward."""

    _average = True  # but not in the first batches of an accumulation

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that this process trains."""
        return self.module.network.parameters()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._average = False
        try:
            yield
        finally:
            self._average = True

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """Have autograd average the gradients before it returns, as with DistributedDataParallel."""

        def average_at_end(gradient: Tensor) -> None:
            handle.remove()
            torch.autograd.Variable._execution_engine.queue_callback(self.average_gradients)

        if self._average and self.layout.data_parallel_size > 1 and self.virtual_parts is None:
            handle = closure_loss.register_hook(average_at_end)  # type: ignore[no-untyped-call]

    def average_gradients(self) -> None:
        if gradients := [parameter.grad for parameter in self.trained_parameters() if parameter.grad is not None]:
            num_replicas = self.layout.data_parallel_size
            send_as_one(lambda flat: dist.all_reduce(flat.div_(num_replicas), group=self.data_group), gradients)


def make_mesh(device_type: str, *, model_size: int, timeout: timedelta | None) -> DeviceMesh:
    """The mesh of all processes; each of them must call this. `model_size`, the size of "model", divides their number.

    `init_device_mesh` would give the groups of the axes torch's own time limit, ten minutes under NCCL.
    """
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    ranks = torch.arange(dist.get_world_size()).view(-1, model_size)
    data, model = divmod(dist.get_rank(), model_size)
    # Lightning binds the group of all to the GPU: each would have to take part in making each group, by a call of NCCL.
    bound, world.bound_device_id = world.bound_device_id, None
    groups: list[Any] = [
        # The group of all processes exists already. Each of the others is made by its own processes alone.
        world
        if len(line) == ranks.numel()
        else dist.new_group(line.tolist(), timeout=timeout, use_local_synchronization=True)
        for line in (ranks[:, model], ranks[data])
    ]
    if dist.get_backend() == "nccl":
        world.bound_device_id = bound
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("data", "model"))


def send_as_one(send: Callable[[Tensor], object], tensors: Sequence[Tensor]) -> None:
    """Call `send` with all elements of `tensors`, (n,), and copy its results back, in place."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    send(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    internals.foreach_copy_([*tensors], [part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)])


def move_and_broadcast(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move `tensors` to `device`, in place, with the values of the first process; every process must call this."""
    for tensor in tensors:
        tensor.data = tensor.detach().to(device).contiguous()
        dist.broadcast(tensor.detach(), src=0)


@torch.no_grad()
def clip_by_whole_norm(
    optimizer: Optimizer, clip_val: float, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """`torch.nn.utils.clip_grad_norm_` for all parameters of `optimizer`, with the norm of each gradient as a whole.

    `group` are the processes that together have each gradient once; None if this one has all, or a part of all.
    """
    gradients = [parameter.grad for parameter in parameters_of(optimizer)]
    norms = torch.stack([_norm(gradient).to(device) for gradient in gradients])
    if group is not None:
        dist.all_reduce(norms, group=group)  # all processes but one contribute zeros
    scale = (clip_val / (_norm(norms) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        if gradient is not None:
            local_part(gradient).mul_(scale.to(gradient.device))


def _norm(values: Tensor | None) -> Tensor:
    """The L2 norm, float64, (), of all that the processes hold of `values`; 0 for None.

    The kernel gets the same elements in the same order on any number of processes.
    """
    if values is None:
        return torch.zeros((), dtype=torch.float64)
    whole = values.full_tensor() if isinstance(values, DTensor) else values
    norm: Tensor = torch.linalg.vector_norm(whole.contiguous(), dtype=torch.float64)
    return norm


def _clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
    """`torch.nn.utils.clip_grad_value_`, which fails where a process has no gradient, as all of its stage is frozen."""
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            local_part(parameter.grad).clamp_(-clip_val, clip_val)


class AgreedGradScaler(GradScaler):
    """A gradient scaler for which a gradient has overflowed in all processes if it has in any.

    Under `16-mixed` a step whose gradients have overflowed is skipped, and the scale of the loss is lowered
    (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740). Processes with different parameters have to agree.
    """

    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any) -> Any:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, *args)
        if not found:  # a stage without parameters has no gradient; the other processes wait all the same
            found[found_inf.device] = found_inf
        for has_overflowed in found.values():
            dist.all_reduce(has_overflowed, op=dist.ReduceOp.MAX)
        return found


def loss_scale(precision: Precision, device: torch.device) -> Tensor | float:
    """The factor by which `precision` will multiply a loss on `device` before backward."""
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        return 1.0
    scale: Tensor = precision.scaler.scale(torch.ones((), device=device))
    return scale
