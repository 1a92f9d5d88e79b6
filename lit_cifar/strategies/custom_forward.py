"""Base of the modes that replace the module's forward by a runner of their own."""

from abc import ABC, abstractmethod
from typing import cast

import lightning as L
import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn
from typing_extensions import override

from lit_cifar.strategies.device_copies import blame, refuse_faulty_copies
from lit_cifar.strategies.network import Runner, RunsNetwork, as_runs_network, runs_network
from lit_cifar.strategies.parts import Parts


class CustomForwardStrategy(ParallelStrategy, ABC):
    """From `setup` to `teardown` the module's `forward` calls a runner that the subclass makes.

    A subclass must name this before the Lightning strategy that it also derives from, whose methods this one extends.

    Attributes:
        strategy_name: Value of `--trainer.strategy`.
        description: What the mode does, for Lightning's registry.
        parts: With `--virtual_replicas`, the parts of a batch, which pass through the runner one by one.
    """

    strategy_name = "runner"
    description = ""
    parts: Parts | None = None

    @abstractmethod
    def make_runner(self, network: nn.Module) -> Runner:
        """The callable to use in place of `network`, which is on the device where `model_to_device` has put it."""

    def use_parts(self, parts: Parts | None) -> None:
        """From the next `setup` on the runner gets `parts`, each of which is to be computed by itself."""
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
        module = cast(RunsNetwork, self.lightning_module)
        module.use_runner(self.make_runner(module.network))

    @override
    def teardown(self) -> None:
        # This is also called when `connect` or `setup` has failed.
        if runs_network(self.lightning_module):
            cast(RunsNetwork, self.lightning_module).use_runner(None)
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register the name; a second registration, by a reloaded module, replaces the first."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.description, override=True)
