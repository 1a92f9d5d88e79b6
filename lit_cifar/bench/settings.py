"""What all sections of `bench` are told."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_cifar.models import Arch

Report = Callable[[str], None]  # called with a line about what is measured next


@dataclass(frozen=True, kw_only=True)
class Settings:
    """On what is measured, and how often."""

    device: torch.device
    folder: Path  # exists; runs write below it
    rounds: int = 5  # how often each of the things that are compared is timed
    # A network of a few layers, few images and few rounds, for tests: the figures then say nothing about a machine.
    small: bool = False

    @property
    def arch(self) -> Arch:
        return "tiny" if self.small else "resnet34"
