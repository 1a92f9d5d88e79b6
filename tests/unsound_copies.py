"""Copies between devices that `doctor` tries in another process: they lose bytes, raise an error, or do not end."""

import time
from collections.abc import Sequence

import torch


def lose(devices: Sequence[torch.device]) -> dict[tuple[str, str], str]:
    return {("cuda:1", "cuda:0"): "of a copy of 4,096 bytes 8 did not arrive"}


def fail(devices: Sequence[torch.device]) -> None:
    raise RuntimeError("CUDA error: unknown\nmore")


def hang(devices: Sequence[torch.device]) -> None:
    time.sleep(600)
