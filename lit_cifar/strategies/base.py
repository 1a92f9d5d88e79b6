"""Base of the modes that replace the module's forward by a function of their own, and what they ask of a module.

In these files `override` stands where nothing else would show that a method has another name.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from torch import Tensor, nn

from lit_cifar import internals
from lit_cifar.errors import ConfigError, one_line
from lit_cifar.mode import ForwardFn, Mode, NoRecorder
from lit_cifar.mode.refusals import refuse
from lit_cifar.models.blocks import blocks_of
from lit_cifar.models.partition import Partition
from lit_cifar.strategies.device_copies import refuse_faulty_copies
from lit_cifar.strategies.parts import VirtualParts


class RunsNetwork(Protocol):
    """Members of a LightningModule that these modes use."""

    network: nn.Module
    image_shape: tuple[int, ...]  # channels, height and width of an image that enters `network`

    def use_forward_fn(self, forward_fn: ForwardFn | None) -> None:
        """From now on `forward` calls `forward_fn` in place of `network`; None restores `network`."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (n,), from `logits` (n, C) and `labels` (n,); `pp` alone asks for it."""


def compiles(module: object) -> bool:
    return bool(getattr(module, "compiles", False))


@contextmanager
def without_network(module: Any) -> Iterator[nn.Module]:
    """Take the network, which is yielded, out of a module while that is moved as a whole."""
    network, module.network = module.network, nn.Identity()
    yield network
    module.network = network


def check_untied(network: nn.Module, divided: Iterable[Iterable[nn.Module]], *, strategy: str) -> None:
    """Raise a `ConfigError` if two parts of `network`, each given as its modules, share a parameter or buffer."""
    seen: set[Tensor] = set()
    for modules in divided:
        own = {tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False))}
        if shared := own & seen:
            known = chain(network.named_parameters("", True, False), network.named_buffers("", True, False))
            named = [(name, tensor) for name, tensor in known if tensor in shared]
            names = " = ".join(name for name, tensor in named if tensor is named[0][1])
            problem = f"{names} is needed in two places, between which --trainer.strategy={strategy} cuts the network"
            raise ConfigError(problem, remedy="pass --trainer.strategy=ddp")
        seen |= own


def check_gradient_hooks(network: nn.Module, *, strategy: str, also_accumulated: bool = True) -> None:
    """Raise a `ConfigError` if a parameter has a hook on its gradient, or, if asked for, on the accumulated one."""
    kinds = ["_backward_hooks", *["_post_accumulate_grad_hooks"] * also_accumulated]  # torch has no other access
    for name, parameter in network.named_parameters():
        if any(getattr(parameter, kind, None) for kind in kinds):
            problem = f"{name} has a hook on its gradient, which --trainer.strategy={strategy} calls otherwise or never"
            raise ConfigError(problem, remedy="leave out the hook, or pass --trainer.strategy=ddp")


class CustomForwardStrategy(Mode, ParallelStrategy, ABC):
    """From `setup` to `teardown` the module's `forward` calls a function that the subclass makes.

    A subclass must name this before the Lightning strategy that it also derives from, whose methods this one extends.
    """

    strategy_name = "custom_forward"  # value of `--trainer.strategy`
    registered: ClassVar[dict[str, dict[str, Any]]] = {}  # all values of it with their arguments, if there are several
    needs: ClassVar[list[str]] = ["network", "use_forward_fn"]  # attributes that a module must have, see `RunsNetwork`
    virtual_parts: VirtualParts | None = None  # with `--virtual_replicas`, what passes through that function one by one

    @abstractmethod
    def make_forward_fn(self, network: nn.Module) -> ForwardFn:
        """The callable to use in place of `network`, which is on the device where `model_to_device` has put it."""

    @property
    def module(self) -> RunsNetwork:
        return cast(RunsNetwork, self.lightning_module)

    def use_virtual_parts(self, parts: VirtualParts) -> None:
        """Give `parts` to that function from the next `setup` on; a `ConfigError` where this would change the bits."""
        refuse("--virtual_replicas=4", self, parts=parts.num_parts)
        self.virtual_parts = parts

    @property
    def copying_devices(self) -> list[list[torch.device]]:
        """For each process on this machine, the devices between which it copies tensors. Most modes have none."""
        return []

    def setup_environment(self) -> None:
        if self.local_rank == 0:
            for group in self.copying_devices:
                devices = [*dict.fromkeys(group)]
                if len(devices) > 1 and devices[0].type == "cuda":
                    refuse_faulty_copies(devices, strategy=self.strategy_name)
        super().setup_environment()

    def check(self) -> None:
        """Raise a `ConfigError` if sizes and flags contradict each other; subclasses extend this."""
        if self.synchronises_batchnorm:
            refuse("--trainer.sync_batchnorm=true", self)

    def _configure_launcher(self) -> None:
        self.check()  # Lightning calls this last while a Trainer is made, when all flags are known
        super()._configure_launcher()

    def connect(self, model: L.LightningModule) -> None:
        """Raise a `ConfigError` for a module that lacks what this mode `needs`, or that this mode cannot compile."""
        if missing := [name for name in self.needs if not hasattr(model, name)]:
            lacks = f"{type(model).__name__} has no {' and no '.join(missing)}"
            problem = f"--trainer.strategy={self.strategy_name} runs a module's network in its own way, and {lacks}"
            raise ConfigError(problem, remedy="use lit_cifar.LitResNet, or pass --trainer.strategy=ddp")
        internals.require(internals.MODES, f"--trainer.strategy={self.strategy_name}")
        if compiles(model):
            refuse("--model.compile=true", self)
        super().connect(model)

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        self.module.use_forward_fn(self.make_forward_fn(self.module.network))

    def teardown(self) -> None:
        # This is also called when `connect` or `setup` has failed.
        if hasattr(self.lightning_module, "use_forward_fn"):
            self.module.use_forward_fn(None)
        super().teardown()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the class under the names that it gives itself, in place of one that was there before."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        for name, sizes in own.get("registered", {own.get("strategy_name"): {}}).items():
            if name is not None:
                StrategyRegistry.register(name, cls, description=cls.__doc__, override=True, **sizes)


class CutStrategy(CustomForwardStrategy, ABC):
    """A mode that cuts the network between its blocks into stages of about equal FLOP."""

    needs: ClassVar[list[str]] = [*CustomForwardStrategy.needs, "image_shape"]
    partition: Partition  # the blocks of each stage; known from `connect` on
    recorder: NoRecorder = NoRecorder()

    def cut(self, num_stages: int) -> None:
        """Cut the network of the module, or refuse it."""
        network = self.module.network
        if blocks_of(network) is None:
            mode, kind = f"--trainer.strategy={self.strategy_name}", type(network).__name__
            problem = f"{mode} cuts a network between its blocks, and {kind} does not say which it has"
            remedy = "make it an nn.Sequential, give it blocks() (lit_cifar.models.blocks)"
            raise ConfigError(problem, remedy=f"{remedy}, or pass --trainer.strategy=ddp")
        try:
            self.partition = Partition.cut(network, self.module.image_shape, num_stages=num_stages)
        except (AttributeError, RuntimeError, TypeError) as error:  # the blocks are the user's own code
            problem = f"the blocks of {type(network).__name__} do not pass one tensor on, or not on the meta device"
            raise ConfigError(f"{problem}: {one_line(error)}", remedy="pass --trainer.strategy=ddp") from error
        stages = self.partition.modules(network)
        check_untied(network, (stage.modules() for stage in stages), strategy=self.strategy_name)


class SingleProcessStrategy(CustomForwardStrategy, ABC):
    """One process on one machine, without communication; batches arrive at the first of its devices."""

    is_single_process = True
    with_processes = "ddp"  # the mode to use instead for several processes

    # Lightning assigns it from Trainer(num_nodes=...), but only to strategies that have the attribute.
    num_nodes: int = 1
    global_rank = local_rank = node_rank = 0
    world_size = 1
    distributed_sampler_kwargs: Any = MappingProxyType({"num_replicas": 1, "rank": 0})

    model_to_device: Any = SingleDeviceStrategy.model_to_device
    reduce: Any = SingleDeviceStrategy.reduce
    reduce_boolean_decision: Any = SingleDeviceStrategy.reduce_boolean_decision
    all_gather: Any = SingleDeviceStrategy.all_gather
    barrier: Any = SingleDeviceStrategy.barrier
    broadcast: Any = SingleDeviceStrategy.broadcast

    @property
    def devices(self) -> list[torch.device]:
        """The trainer's devices; on the CPU, `--trainer.devices=n` are n virtual ones."""
        return self.parallel_devices or []

    @property
    def root_device(self) -> torch.device:
        return self.devices[0]

    def check_divides(self, name: str, size: int) -> None:
        num_devices = len(self.devices)
        if size < 1 or size % num_devices:
            nearest = max(1, round(size / num_devices)) * num_devices
            problem = f"--trainer.strategy.{name}={size} do not divide over --trainer.devices={num_devices}"
            raise ConfigError(problem, remedy=f"pass --trainer.strategy.{name}={nearest}, or leave it out")

    def check(self) -> None:
        """Refuse other processes: each would train a model of its own."""
        super().check()
        mode, other = f"--trainer.strategy={self.strategy_name}", f"--trainer.strategy={self.with_processes}"
        num_processes = self.cluster_environment.world_size() if self.cluster_environment is not None else 1
        if dist.is_torchelastic_launched() or max(num_processes, self.num_nodes) > 1:
            others = f"--trainer.num_nodes={self.num_nodes}, or torchrun or a cluster has started {num_processes}"
            start = f"start it by python -m lit_cifar fit {mode} --trainer.devices=2"
            raise ConfigError(f"{mode} is one process, but {others}", remedy=f"{start}, or pass {other}")
