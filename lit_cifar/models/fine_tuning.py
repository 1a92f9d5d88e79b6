"""What a user sets about parts of a network that a training leaves as they are, and about its classifier."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lit_cifar.errors import bounded


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What a training starts from, leaves as it is, and trains faster.

    Args:
        weights: File whose weights a new training starts from: of this package, torchvision, timm (.safetensors too),
            or any program that saves a `state_dict()`, also in a dictionary or behind prefixes. What of it fits is
            taken, a classifier of another number of classes is not, and what is new is said.
        freeze: Parameters that stay as they are: a pattern of their names, such as "conv1.*", or a list of patterns.
            BatchNorm layers among them normalise by their running statistics, which stay too.
        head_lr: Learning rate of the classifier, where --model.optimizer.lr is that of all other parameters. Schedules
            keep the ratio of the two, but for a floor (`eta_min`, `min_lr`), which is that of both. Refused with
            `OneCycleLR` and `CyclicLR`, which have rates of their own.
    """

    weights: str | None = None
    freeze: list[str] | str | None = None
    head_lr: float | None = None

    def __post_init__(self) -> None:
        bounded("--model.fine_tuning.head_lr", self.head_lr, 0)

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

    @classmethod
    def of(cls, settings: FineTuning, network: nn.Module) -> "Frozen":
        """What `settings` freeze. It asks for no gradients from now on."""
        if not settings.freeze:
            return cls()
        from lit_cifar.models.frozen import matching

        patterns = [settings.freeze] if isinstance(settings.freeze, str) else settings.freeze
        frozen = cls(*matching(network, patterns))
        for name in frozen.parameters:
            network.get_parameter(name).requires_grad_(False)
        return frozen

    def keep_norms(self, network: nn.Module) -> None:
        for name in self.norms:
            network.get_submodule(name).eval()

    def told(self, network: nn.Module) -> str:
        share = f"{len({*map(network.get_parameter, self.parameters)})} of {len([*network.parameters()])} parameters"
        return f"not trained: {share}, and the statistics of {len(self.norms)} BatchNorm layers"
