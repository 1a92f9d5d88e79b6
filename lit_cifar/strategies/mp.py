"""`mp` and `ddp_mp`: the layers over the local devices of a process; with several processes, the batch over these.

The network's own blocks are moved, each stage's to its device, and nothing is copied or wrapped: names, optimizer and
checkpoints are those of one device. The order in which microbatches pass is GPipe's (Huang et al. 2019,
https://arxiv.org/abs/1811.06965).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lit_cifar import internals
from lit_cifar.errors import ConfigError, bounded
from lit_cifar.mode import ForwardFn, NoRecorder
from lit_cifar.models.compiled import Compiled
from lit_cifar.models.memory_format import follow_parameters
from lit_cifar.models.random_streams import draw_for_part, draw_for_stage, know_stages
from lit_cifar.strategies.base import CutStrategy, SingleProcessStrategy, compiles, without_network
from lit_cifar.strategies.parts import VirtualParts


class StagedForward:
    """Sends the microbatches of a batch, cut by `Tensor.tensor_split`, through stages on different devices.

    Kernels on CUDA are queued, and the host returns at once: while a device works on one microbatch, the host issues
    the next device's work on another. In backward, autograd does so by itself, with a thread for each device.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[Tensor], Tensor]],
        devices: Sequence[torch.device],
        *,
        num_microbatches: int = 1,
        recorder: NoRecorder | None = None,
    ) -> None:
        self.stages = list(zip(stages, devices, strict=True))
        self.num_microbatches = num_microbatches
        self._recorder = recorder or NoRecorder()
        self._names = device_names(devices)

    def __call__(self, images: Tensor) -> Tensor:
        """The output (n, ...) for a batch (n, ...), on the batch's device; n may be 0."""
        pieces = [piece for piece in images.tensor_split(self.num_microbatches) if len(piece)] or [images]
        for microbatch, index in gpipe_order(num_microbatches=len(pieces), num_stages=len(self.stages)):
            pieces[microbatch] = self._run(index, microbatch, pieces[microbatch])
        outputs = [_sent(piece, images.device) for piece in pieces]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run(self, index: int, microbatch: int, piece: Tensor) -> Tensor:
        stage, device = self.stages[index]
        here = _sent(piece, device)
        if self.num_microbatches > 1:
            draw_for_part(microbatch)
        draw_for_stage(index)
        what: Any = {"stage": index, "microbatch": microbatch, "worker": self._names[index], "device": device}
        with self._recorder.span("forward", **what):
            output = stage(here)
        self._recorder.follow_backward(output, here, **what)
        return output


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to `device`. The host waits only for copies to the CPU, which it is going to read."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def gpipe_order(*, num_microbatches: int, num_stages: int) -> Iterator[tuple[int, int]]:
    """Pairs (microbatch, stage) in the order of issue: microbatch m passes stage s at tick m + s.

    Within a tick the later stages come first: a copy waits in the sender's queue, behind its work on the next one.
    """
    for tick in range(num_microbatches + num_stages - 1):
        for stage in reversed(range(num_stages)):
            if 0 <= tick - stage < num_microbatches:
                yield tick - stage, stage


class StagedStrategy(CutStrategy, ABC):
    """Places the network's stages on `stage_devices`, and everything else of the module on the root device.

    Args:
        num_stages: Number of stages, a multiple of the number of devices; None for one on each device.
        num_microbatches: Number of pieces into which a replica cuts its part of the batch.
    """

    num_microbatches = 1

    def __init__(self, *, num_stages: int | None = None, num_microbatches: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_microbatches = num_microbatches
        self._num_stages = num_stages

    @property
    def num_stages(self) -> int:
        """Number of stages. Known once the Trainer is made."""
        return len(self.parallel_devices or ()) if self._num_stages is None else self._num_stages

    @property
    @abstractmethod
    def stage_devices(self) -> list[torch.device]:
        """The device of each of this process's stages; the first is the root device."""

    def check(self) -> None:
        super().check()
        # Not in `__init__`: the command line would say that the class does not fit --trainer.strategy.
        bounded("--trainer.strategy.num_stages", self.num_stages, 1)
        bounded("--trainer.strategy.num_microbatches", self.num_microbatches, 1)
        if self.synchronises_batchnorm and self.num_microbatches > 1:
            problem = f"--trainer.sync_batchnorm=true: {self.num_microbatches} microbatches are normalised one by one"
            raise ConfigError(problem, remedy="leave it out, or pass --trainer.strategy.num_microbatches=1")

    def use_virtual_parts(self, parts: VirtualParts) -> None:
        if self.num_microbatches > 1:
            problem = f"--virtual_replicas={parts.num_parts}: a part passes all stages before the next one"
            raise ConfigError(problem, remedy="pass --trainer.strategy.num_microbatches=1, or --trainer.strategy=pp")
        super().use_virtual_parts(parts)

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        # `setup` would be too late: it may put layers into the network that only run among processes.
        self.cut(self.num_stages)

    def model_to_device(self) -> None:
        """Move each stage to its device, and all else to the root device, which may be too small for the network."""
        module: Any = self.lightning_module
        with without_network(module) as network:
            module.to(self.root_device)
        for stage, device in zip(self.partition.modules(network), self.stage_devices, strict=True):
            stage.to(device)

    def make_forward_fn(self, network: nn.Module) -> ForwardFn:
        stages = self.partition.modules(network)
        know_stages(stages)
        calls = [Compiled(stage) for stage in stages] if compiles(self.lightning_module) else stages
        return StagedForward(calls, self.stage_devices, num_microbatches=self.num_microbatches, recorder=self.recorder)

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        # Lightning has moved the first state of optimizers, such as Adagrad's sums, to the root device.
        for optimizer in self.optimizers:
            follow_parameters(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers; torch brings each tensor to its parameter's device, and there it stays."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


def device_names(devices: Sequence[torch.device]) -> list[str]:
    """Names of `devices` in a table. The CPU's virtual ones are numbered."""
    return [f"{device.type} {place if device.index is None else device.index}" for place, device in enumerate(devices)]


class LayerParallelStrategy(StagedStrategy, SingleProcessStrategy):
    """Runs consecutive layers of the network on each device of one process.

    The result equals one device; with microbatches, one that normalises each and moves running statistics for each.
    """

    strategy_name = "mp"
    with_processes = "ddp_mp"

    @property
    def stage_devices(self) -> list[torch.device]:
        return self._spread(self.devices)

    @property
    @override
    def copying_devices(self) -> list[list[torch.device]]:
        return [self.stage_devices]

    def _spread(self, values: list[Any]) -> list[Any]:
        """Return a value for each stage, from one for each device."""
        return [value for value in values for _ in range(self.num_stages // len(values))]

    def check(self) -> None:
        super().check()
        self.check_divides("num_stages", self.num_stages)

    def split_lines(self) -> list[str]:
        return self.partition.table(self._spread(device_names(self.devices)))


class DDPLayerParallelStrategy(StagedStrategy, DDPStrategy):
    """Starts processes as Lightning's `ddp` does, each with a replica of the network on `num_stages` devices.

    `--trainer.devices` counts the devices of a machine, as always. The result equals `ddp` with as many processes; with
    several microbatches, one device that normalises each microbatch of each replica separately.

    Args:
        num_stages: Number of stages, which is the number of devices of a process.
    """

    strategy_name = "ddp_mp"

    def __init__(self, *, num_stages: int = 2, **kwargs: Any) -> None:
        super().__init__(num_stages=num_stages, **kwargs)

    @property
    @override
    def devices_per_process(self) -> int:
        return self.num_stages

    @property
    @override
    def num_processes(self) -> int:
        # The divisor is at least 1 because Lightning asks before `check` can refuse fewer stages.
        return len(self.parallel_devices or ()) // max(1, self.num_stages)

    @property
    def root_device(self) -> torch.device:
        return self.stage_devices[0]

    @property
    def stage_devices(self) -> list[torch.device]:
        return self.copying_devices[self.local_rank]

    @property
    @override
    def copying_devices(self) -> list[list[torch.device]]:
        devices = self.parallel_devices or []
        return [devices[rank * self.num_stages :][: self.num_stages] for rank in range(self.num_processes)]

    def check(self) -> None:
        super().check()
        num_devices, each = len(self.parallel_devices or ()), self.num_stages
        if num_devices % each:
            problem = f"--trainer.devices={num_devices} does not divide into processes of {each} stages"
            nearest = max(1, round(num_devices / each)) * each
            stages = f"--trainer.strategy={type(self).__name__} --trainer.strategy.num_stages={num_devices}"
            raise ConfigError(problem, remedy=f"pass --trainer.devices={nearest}, or {stages}")
        assert self.cluster_environment is not None
        started, wanted = self.cluster_environment.world_size(), self.num_nodes * self.num_processes
        if started != wanted:
            problem = f"{started} processes were started, but {wanted} are needed: each has {each} devices"
            raise ConfigError(problem, remedy=f"start torchrun with --nproc-per-node={self.num_processes}")

    @override
    def setup_distributed(self) -> None:
        """Set up like Lightning, without binding the process group to the root device: not all stages are there."""
        reset_seed()
        self.set_world_ranks()
        backend = self._process_group_backend = self._get_process_group_backend()
        internals.init_dist_connection(self.cluster_environment, backend, timeout=self._timeout)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap without device ids: DistributedDataParallel then accepts a module on several devices."""
        return DistributedDataParallel(model, **self._ddp_kwargs)

    def split_lines(self) -> list[str]:
        """The stages of the first process and their devices, a line each; others have the devices that follow."""
        return self.partition.table(device_names(self.copying_devices[0]))
