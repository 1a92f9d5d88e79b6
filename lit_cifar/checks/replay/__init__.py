"""Replays steps of any training on one device, and compares bit for bit."""

from lit_cifar.checks.replay.callback import Replay, ReplayError
from lit_cifar.checks.replay.plain import replay

__all__ = ["Replay", "ReplayError", "replay"]
