"""What the modes have in common that run the network in a way of their own."""

from abc import ABC, abstractmethod
from typing import cast

import lightning as L
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn
from typing_extensions import override

from lit_cifar.strategies.network import Runner, RunsNetwork, as_runs_network, runs_network


class RunnerStrategy(ParallelStrategy, ABC):
    """From `setup` to `teardown` the module's `forward` goes through a runner that the subclass makes.

    To be named before the Lightning strategy that a subclass also derives from: it extends that one's methods.

    Attributes:
        strategy_name: What `--trainer.strategy` takes.
        description: What the mode does, for Lightning's registry.
    """

    strategy_name = "runner"
    description = ""

    @abstractmethod
    def make_runner(self, network: nn.Module) -> Runner:
        """What to call in place of `network`, which is where `model_to_device` has put it."""

    def check(self) -> None:
        """Find contradicting sizes and flags; subclasses extend it.

        Raises:
            ConfigError: Some of them cannot work.
        """

    @override
    def _configure_launcher(self) -> None:
        """Refuse what cannot work. Lightning calls this last while a Trainer is made, when every flag has arrived."""
        self.check()
        super()._configure_launcher()

    @override
    def connect(self, model: L.LightningModule) -> None:
        """Accept a module whose network can be run by a strategy.

        Raises:
            ConfigError: `model` has no `network` and `use_runner`.
        """
        as_runs_network(model, strategy=self.strategy_name)
        super().connect(model)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        module = cast(RunsNetwork, self.lightning_module)
        module.use_runner(self.make_runner(module.network))

    @override
    def teardown(self) -> None:
        # Also reached when `connect` or `setup` failed, so nothing may be taken for granted.
        if runs_network(self.lightning_module):
            cast(RunsNetwork, self.lightning_module).use_runner(None)
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make the name known; registering again, as a reloaded module does, replaces the entry."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.description, override=True)
