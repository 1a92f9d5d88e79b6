"""`mp`: the layers divided over the local devices of one process; `ddp_mp` has the same stages in each of several.

The network's own blocks are moved, each stage's to its device, and nothing is copied or wrapped: names, optimizer and
checkpoints are those of one device. The order in which microbatches pass is GPipe's (Huang et al. 2019,
https://arxiv.org/abs/1811.06965).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.models.compiled import Compiled
from lit_cifar.models.random_streams import begin_part, begin_stage
from lit_cifar.strategies.base import CutStrategy, NoRecorder, Runner, SingleProcessStrategy, at_least_one, compiles
from lit_cifar.strategies.same_bits.parts import Parts


class StagedRunner:
    """Sends the microbatches of a batch, which `Tensor.tensor_split` cuts, through stages on different devices.

    Kernels on CUDA are queued, and the host returns at once: while a device works on one microbatch, the host issues
    the next device's work on another. In backward, autograd does so by itself, with a thread for each device. The
    `recorder` is told which stage works when.
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
            begin_part(microbatch)
        begin_stage(index)
        what: Any = {"stage": index, "microbatch": microbatch, "worker": self._names[index], "device": device}
        with self._recorder.span("forward", **what):
            output = stage(here)
        self._recorder.follow_backward(output, here, **what)
        return output


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; the host waits for what it is going to read itself, which might not have arrived yet."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def gpipe_order(*, num_microbatches: int, num_stages: int) -> Iterator[tuple[int, int]]:
    """Pairs (microbatch, stage) in the order of issue: microbatch m passes stage s at tick m + s.

    Within a tick the later stages come first: a copy between devices waits in the sender's queue, and issued after the
    sender's work on the next microbatch, would arrive a tick late.
    """
    for tick in range(num_microbatches + num_stages - 1):
        for stage in reversed(range(num_stages)):
            if 0 <= tick - stage < num_microbatches:
                yield tick - stage, stage


class StagedStrategy(CutStrategy, ABC):
    """The network's stages over `stage_devices`; everything else of the module on the root device.

    Args:
        num_stages: Into how many the network is cut, a multiple of the number of devices; None for one for each.
        num_microbatches: Into how many pieces a replica cuts its part of the batch.
        cuts: The blocks with which the second and later stages begin, e.g. ["layer3.1"]; by default stages of about
            equal FLOP.
        **kwargs: As of the Lightning strategy that a subclass also derives from.
    """

    def __init__(
        self,
        *,
        num_stages: int | None = None,
        num_microbatches: int = 1,
        cuts: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_microbatches = num_microbatches
        self.cuts = cuts
        self.recorder = NoRecorder()
        self._num_stages = num_stages

    @property
    def num_stages(self) -> int:
        """Known once the Trainer is made."""
        return len(self.parallel_devices or ()) if self._num_stages is None else self._num_stages

    @property
    @abstractmethod
    def stage_devices(self) -> list[torch.device]:
        """The device of each of this process's stages; the first is the root device."""

    @override
    def check(self) -> None:
        super().check()
        at_least_one(num_stages=self.num_stages, num_microbatches=self.num_microbatches)
        if self._layer_sync is not None and self.num_microbatches > 1:
            raise ConfigError(
                f"--trainer.sync_batchnorm=true with {self.num_microbatches} microbatches: they pass a layer one after "
                "the other, so each is normalised by itself.",
                remedy="Drop --trainer.sync_batchnorm, or pass --trainer.strategy.num_microbatches=1.",
            )

    @override
    def use_parts(self, parts: Parts) -> None:
        if self.num_microbatches > 1:
            raise ConfigError(
                f"--virtual_replicas={parts.num_parts} with {self.num_microbatches} microbatches: a part passes all "
                "stages before the next one",
                remedy="pass --trainer.strategy.num_microbatches=1, or use --trainer.strategy=pp, where a part is one",
            )
        super().use_parts(parts)

    @override
    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        # Here and not in `setup`, which may first put layers into the network that only run among processes. Virtual
        # devices can have a tensor together.
        self.cut(self.num_stages, may_share=len(set(self.stage_devices)) == 1)

    @override
    def model_to_device(self) -> None:
        """Each stage to its device, all else to the root device, which need not have room for the whole network."""
        module = self.lightning_module
        assert module is not None
        network = self.module.network
        for child in module.children():
            if child is not network:
                child.to(self.root_device)
        # What `module.to()` would note beside moving: the device on which Lightning makes the module's own tensors.
        _update_properties(module, device=self.root_device)
        for stage, device in zip(self.partition.stages, self.stage_devices, strict=True):
            stage.module(network).to(device)

    @override
    def make_runner(self, network: nn.Module) -> Runner:
        stages = self.partition.modules(network)
        return StagedRunner(
            [Compiled(stage) for stage in stages] if compiles(self.lightning_module) else stages,
            self.stage_devices,
            num_microbatches=self.num_microbatches,
            recorder=self.recorder,
        )

    def on_one_device(self, network: nn.Module) -> Runner:
        """The microbatches one after the other."""

        def run(images: Tensor) -> Tensor:
            outputs = []
            for number, piece in enumerate(images.tensor_split(self.num_microbatches)):
                if self.num_microbatches > 1:
                    begin_part(number)
                outputs.append(network(piece))
            return torch.cat(outputs)

        return run

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        # Lightning has moved what optimizers begin with, Adagrad's sums for one, to the root device.
        for optimizer in self.optimizers:
            state_to_parameters(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers; torch brings each tensor to its parameter's device, and there it stays."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


def state_to_parameters(optimizer: Optimizer) -> None:
    """Move each tensor of an optimizer's state to its parameter's device; "step" stays where the optimizer keeps it."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor):
                state[name] = value.to(parameter.device)


def device_names(devices: Sequence[torch.device], *, first: int = 0) -> list[str]:
    """What to call `devices` in a table, the CPU's virtual ones by their number from `first` on."""
    return [
        f"{device.type} {index if device.index is None else device.index}"
        for index, device in enumerate(devices, start=first)
    ]


class LayerParallelStrategy(StagedStrategy, SingleProcessStrategy):
    """One process, consecutive layers of the one network on each of its devices.

    Equal to one device; with several microbatches to one that normalises each by itself and moves the running
    statistics once for each.
    """

    strategy_name = "mp"
    with_processes = "ddp_mp"

    @property
    @override
    def stage_devices(self) -> list[torch.device]:
        return [self.devices[index] for index in self._device_indices]

    @property
    @override
    def copying_devices(self) -> list[list[torch.device]]:
        return [self.stage_devices]

    @property
    def _device_indices(self) -> list[int]:
        return [stage * len(self.devices) // self.num_stages for stage in range(self.num_stages)]

    @override
    def check(self) -> None:
        super().check()
        num_devices = len(self.devices)
        if self.num_stages % num_devices:
            nearest = max(1, round(self.num_stages / num_devices)) * num_devices
            raise ConfigError(
                f"--trainer.strategy.num_stages={self.num_stages} do not divide over --trainer.devices={num_devices}",
                remedy=f"pass --trainer.strategy.num_stages={nearest} or --trainer.devices={self.num_stages}",
            )

    def split_lines(self) -> list[str]:
        names = device_names(self.devices)
        return self.partition.table([names[index] for index in self._device_indices])
