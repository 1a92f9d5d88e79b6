"""Base of the modes that replace the module's forward by a runner of their own, and what they ask of a module."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Protocol, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor, nn
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.models.blocks import blocks_of
from lit_cifar.models.partition import Partition
from lit_cifar.strategies.device_copies import blame, refuse_faulty_copies
from lit_cifar.strategies.same_bits.parts import Parts, WholeBatch

Runner = Callable[[Tensor], Tensor]


class RunsNetwork(Protocol):
    """The plain network, the shape of an image that enters it, and a way to run it differently."""

    network: nn.Module
    image_shape: tuple[int, ...]

    def use_runner(self, runner: Runner | None) -> None:
        """From now on `forward` calls `runner` in place of `network`; None restores `network`."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (n,), from `logits` (n, C) and `labels` (n,); `pp` alone asks for it."""


def runs_network(module: object) -> bool:
    """Whether `module` offers what `RunsNetwork` asks for, apart from the loss."""
    # Not isinstance of a runtime protocol: from Python 3.12 on that does not see the children of an nn.Module.
    return all(hasattr(module, name) for name in ("network", "use_runner"))


def compiles(module: object) -> bool:
    """Whether `module` wants its network compiled."""
    return bool(getattr(module, "compiles", False))


def as_runs_network(module: object, *, strategy: str) -> RunsNetwork:
    """`module`; raises a `ConfigError` if it lacks what `RunsNetwork` asks for, apart from the loss."""
    if not runs_network(module):
        raise ConfigError(
            f"--trainer.strategy={strategy} runs a module's `network` in its own way, through `use_runner`; "
            f"{type(module).__name__} has no such pair.",
            remedy="Use lit_cifar.task.module.LitResNet, or --trainer.strategy=ddp for any LightningModule.",
        )
    return cast(RunsNetwork, module)


def check_loss(module: object, *, strategy: str) -> None:
    """Raise a `ConfigError` unless `module` has a `loss`, for strategies that run backward themselves."""
    if not hasattr(module, "loss"):
        raise ConfigError(
            f"--trainer.strategy={strategy} asks a module for the `loss` of each sample; "
            f"{type(module).__name__} has none.",
            remedy="Use lit_cifar.task.module.LitResNet, or --trainer.strategy=ddp for any LightningModule.",
        )


def cut_into_stages(
    module: RunsNetwork, *, strategy: str, num_stages: int, cuts: list[str] | None, may_share: bool = False
) -> Partition:
    """The blocks of each stage of the module's network; `may_share` if they may have a tensor together.

    Raises:
        ConfigError: A network that does not say its blocks, more stages than blocks, unknown cuts, or shared tensors.
    """
    network = module.network
    if blocks_of(network) is None:
        raise ConfigError(
            f"--trainer.strategy={strategy} cuts a network between its blocks, and {type(network).__name__} does not "
            "say which it has.",
            remedy="Make it an nn.Sequential, or give it a method blocks() that returns them by name (see\n"
            "lit_cifar.models.blocks); or use --trainer.strategy=ddp, which takes any network.",
        )
    partition = Partition.of(network, module.image_shape, num_stages=num_stages, cuts=cuts)
    if not may_share:
        check_untied(network, partition.modules(network), strategy=strategy)
    return partition


def check_untied(network: nn.Module, divided: Iterable[nn.Module], *, strategy: str, recurse: bool = True) -> None:
    """Raise a `ConfigError` if two of the modules into which `network` is divided have a parameter or buffer in common.

    Without `recurse` only the tensors of the modules themselves count, not those of modules in them.
    """
    seen: set[Tensor] = set()
    for module in divided:
        own = {*module.parameters(recurse), *module.buffers(recurse)}
        if shared := own & seen:
            known = [network.named_parameters("", True, False), network.named_buffers("", True, False)]
            named = [(name, tensor) for name, tensor in chain(*known) if tensor in shared]
            names = " = ".join(name for name, tensor in named if tensor is named[0][1])
            raise ConfigError(
                f"{names} is needed in two places, between which --trainer.strategy={strategy} divides the network",
                remedy="pass --trainer.strategy=ddp, which takes any network",
            )
        seen |= own


def check_gradient_hooks(network: nn.Module, *, strategy: str, also_accumulated: bool = True) -> None:
    """Raise a `ConfigError` if a parameter has a hook on its gradient, or, if asked for, on the accumulated one."""
    kinds = ["_backward_hooks", *["_post_accumulate_grad_hooks"] * also_accumulated]  # torch has no other access
    for name, parameter in network.named_parameters():
        if any(getattr(parameter, kind, None) for kind in kinds):
            raise ConfigError(
                f"{name} has a hook on its gradient, which --trainer.strategy={strategy} would not call once, with the "
                "whole gradient",
                remedy="leave out the hook, or pass --trainer.strategy=ddp",
            )


class CustomForwardStrategy(ParallelStrategy, ABC):
    """From `setup` to `teardown` the module's `forward` calls a runner that the subclass makes.

    A subclass must name this before the Lightning strategy that it also derives from, whose methods this one extends.

    Attributes:
        strategy_name: Value of `--trainer.strategy`.
        description: What the mode does, for Lightning's registry.
        parts: What passes through the runner: the batch, or with `--virtual_replicas` its parts one by one.
    """

    strategy_name = "runner"
    description = ""
    parts: WholeBatch = WholeBatch()

    @abstractmethod
    def make_runner(self, network: nn.Module) -> Runner:
        """The callable to use in place of `network`, which is on the device where `model_to_device` has put it."""

    @property
    def module(self) -> RunsNetwork:
        """The LightningModule, of which `connect` has seen that it runs a network."""
        return cast(RunsNetwork, self.lightning_module)

    def use_parts(self, parts: Parts) -> None:
        """From the next `setup` on the runner gets `parts`, each of which is to be computed by itself.

        A subclass raises a `ConfigError` for those that would end with other bits.
        """
        self.parts = parts

    @property
    def copying_devices(self) -> list[list[torch.device]]:
        """Of each process on this machine, the devices between which it copies tensors; none of most modes."""
        return []

    @override
    def setup_environment(self) -> None:
        """Refuse devices between which copies are lost."""
        environment = self.cluster_environment
        if environment is None or environment.local_rank() == 0:
            for devices in self.copying_devices:
                if len(on_cuda := [*dict.fromkeys(devices)]) > 1 and on_cuda[0].type == "cuda":
                    refuse_faulty_copies(on_cuda, strategy=self.strategy_name)
        super().setup_environment()

    def examine_copies(self) -> tuple[bool, str]:
        """Whether copies between devices are to blame for a loss that is not finite, and what was found."""
        devices = [*dict.fromkeys(device for group in self.copying_devices for device in group)]
        if len(devices) < 2 or devices[0].type != "cuda":
            return False, ""
        if self.world_size > 1:  # the others would wait for this process longer than the watchdog lets them
            return False, "copies between the devices arrived before the run; python -m lit_cifar doctor tries again"
        return blame(devices)

    def check(self) -> None:
        """Raise a `ConfigError` if sizes and flags contradict each other; subclasses extend this."""

    @override
    def _configure_launcher(self) -> None:
        """Check the flags: Lightning calls this last while a Trainer is made, when all of them are known."""
        self.check()
        super()._configure_launcher()

    @override
    def connect(self, model: L.LightningModule) -> None:
        """Accept a module with a `network` and `use_runner`; raise a `ConfigError` for any other."""
        as_runs_network(model, strategy=self.strategy_name)
        super().connect(model)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        self.module.use_runner(self.make_runner(self.module.network))

    @override
    def teardown(self) -> None:
        # This is also called when `connect` or `setup` has failed.
        if runs_network(self.lightning_module):
            self.module.use_runner(None)
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name; a second registration, by a reloaded module, replaces the first."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.description, override=True)


class SingleProcessStrategy(CustomForwardStrategy, ABC):
    """One process on one machine, without communication; batches arrive at the first of its devices."""

    is_single_process = True
    with_processes = "ddp"  # the mode to use instead for several processes

    # Lightning assigns it from Trainer(num_nodes=...), but only to strategies that have the attribute.
    num_nodes: int = 1

    @property
    def devices(self) -> list[torch.device]:
        """The trainer's devices; on the CPU, `--trainer.devices=n` are n virtual ones."""
        return self.parallel_devices or []

    @property
    @override
    def root_device(self) -> torch.device:
        return self.devices[0]

    global_rank = local_rank = node_rank = 0
    world_size = 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The one process reads all the data, and divides batches after loading."""
        return {"num_replicas": 1, "rank": 0}

    @override
    def check(self) -> None:
        """Refuse other processes: each would train a model of its own."""
        super().check()
        name = self.strategy_name
        if self.num_nodes > 1:
            raise ConfigError(
                f"--trainer.strategy={name} is one process on one machine, but --trainer.num_nodes={self.num_nodes}.",
                remedy=f"Use --trainer.strategy={self.with_processes} for several machines.",
            )
        num_processes = self.cluster_environment.world_size() if self.cluster_environment is not None else 1
        if dist.is_torchelastic_launched() or num_processes > 1:
            raise ConfigError(
                f"--trainer.strategy={name} is one process, but {num_processes} were started by torchrun or a cluster.",
                remedy=f"Start it directly (python -m lit_cifar fit --trainer.strategy={name} --trainer.devices=2), "
                f"or use --trainer.strategy={self.with_processes}.",
            )

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.model.to(self.root_device)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`tensor` itself: there is one process."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """`tensor` itself, without a new first dimension, as Lightning's single-device strategy returns it."""
        return tensor

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to wait for."""

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return obj
