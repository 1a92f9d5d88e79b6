"""What a user sets about parts of a network that a training leaves as they are, and about its classifier."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lit_cifar.errors import ConfigError, bounded


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What a training starts from, leaves as it is, and trains faster.

    Args:
        weights: File whose weights a new training starts from: of this package, torchvision, timm (.safetensors too),
            or any program that saves a `state_dict()`, also in a dictionary or behind prefixes. What of it fits is
            taken, a classifier of another number of classes is not, and what is new is said.
        freeze: Parameters that stay as they are: a pattern of their names, such as "conv1.*", or a list of patterns.
            BatchNorm layers among them normalise by their running statistics, which stay too.
        unfreeze_at: Epoch, counted from 0, from whose first step on they are trained too. Until then their gradients
            are computed and thrown away.
        head_lr: Learning rate of the classifier, where --model.optimizer.lr is that of all other parameters. Schedules
            keep the ratio of the two, but for a floor (`eta_min`, `min_lr`), which is that of both.
    """

    weights: str | None = None
    freeze: list[str] | str | None = None
    unfreeze_at: int | None = None
    head_lr: float | None = None

    def __post_init__(self) -> None:
        bounded("--model.fine_tuning.unfreeze_at", self.unfreeze_at, 1)
        bounded("--model.fine_tuning.head_lr", self.head_lr, 0)
        if self.unfreeze_at is not None and not self.freeze:
            problem = f"--model.fine_tuning.unfreeze_at={self.unfreeze_at}, but nothing is frozen"
            raise ConfigError(problem, remedy="add --model.fine_tuning.freeze")

    def parameter_groups(self, network: nn.Module, num_classes: int) -> Any:
        """All parameters, frozen ones too, or with `head_lr` two groups of them, the classifier's last."""
        if self.head_lr is None:
            return network.parameters()
        from lit_cifar.models.frozen import head_of

        own = [*network.get_submodule(head_of(network, num_classes)).parameters()]
        others = [parameter for parameter in network.parameters() if parameter not in {*own}]
        return [{"params": others}, {"params": own, "lr": self.head_lr}]


@dataclass(frozen=True)
class Frozen:
    """Names in a network of what is not trained."""

    parameters: frozenset[str] = frozenset()
    norms: tuple[str, ...] = ()  # BatchNorm layers, which normalise by their running statistics and do not move these
    until: int | None = None  # epoch from which on it is trained; None for never

    @classmethod
    def of(cls, settings: FineTuning, network: nn.Module) -> "Frozen":
        """What `settings` freeze. What is never trained asks for no gradients from now on."""
        if not settings.freeze:
            return cls()
        from lit_cifar.models.frozen import matching

        patterns = [settings.freeze] if isinstance(settings.freeze, str) else settings.freeze
        frozen = cls(*matching(network, patterns), settings.unfreeze_at)
        for name in frozen.parameters if frozen.until is None else ():
            network.get_parameter(name).requires_grad_(False)
        return frozen

    def holds_in(self, epoch: int) -> bool:
        return self.until is None or epoch < self.until

    def switch_norms(self, network: nn.Module, *, training: bool) -> None:
        for name in self.norms:
            network.get_submodule(name).train(training)

    def told(self, network: nn.Module) -> str:
        until = "" if self.until is None else f" before epoch {self.until}"
        share = f"{len(self.parameters)} of {len([*network.parameters()])} parameters"
        return f"not trained{until}: {share}, and the statistics of {len(self.norms)} BatchNorm layers"
