"""`--kernels=auto`: the precision and the memory format that train a network fastest on this machine.

Which these are depends on processor and network. bfloat16 halves the speed of one CPU and doubles that of another, and
channels-last helps in one precision and not in the other. So each is timed for some steps.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from lit_cifar.errors import ConfigError

Precision = Literal["32-true", "bf16-mixed"]
VARIABLE = "LIT_CIFAR_KERNELS"  # tells the processes that a run starts what their parent has found
_STEPS = 2  # timed for each candidate
_FEW_IMAGES = 4
_NEAR = 1.3  # times the shortest step: candidates that are slower on few images are left out
_LONGEST_STEP_S = 0.5  # about, with more images


@dataclass(frozen=True)
class Kernels:
    """What decides which kernels of torch compute a training step."""

    precision: Precision  # as of `--trainer.precision`
    channels_last: bool  # as of `--model.channels_last`

    def __str__(self) -> str:
        return f"{self.precision} channels_last" if self.channels_last else self.precision

    @classmethod
    def parse(cls, text: str) -> "Kernels":
        """The one that `str` has written so; another `text` raises a `ConfigError`."""
        known = {str(each): each for each in CANDIDATES}
        if text not in known:
            raise ConfigError(
                f"{VARIABLE}={text!r} in the environment is none of {', '.join(known)}", remedy=f"unset {VARIABLE}"
            )
        return known[text]


_PRECISIONS: tuple[Precision, ...] = ("32-true", "bf16-mixed")
CANDIDATES = tuple(Kernels(precision, layout) for precision in _PRECISIONS for layout in (False, True))


def fastest(seconds: Mapping[Kernels, float]) -> Kernels:
    """The candidate with the shortest step; of equals the first."""
    return min(seconds, key=lambda each: seconds[each])


def time_candidates(
    network: nn.Module, image_shape: tuple[int, ...], *, batch_size: int, device: torch.device
) -> dict[Kernels, float]:
    """Seconds of forward and backward of the network for each of `CANDIDATES`, the shortest of some steps.

    On a CPU the candidates are first timed on few images. Those that are much slower there are left out, and of the
    others each is timed on more: which memory format is faster depends on the size of the batch. Neither the network
    nor torch's global generators change.

    Args:
        network: From images (n, *image_shape) to logits (n, num_classes).
        image_shape: Channels, height and width.
        batch_size: Of the training, on one device. On a CPU a step may have fewer images.
        device: To measure on.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type != "cpu":
            return _time_each(network, CANDIDATES, image_shape, batch_size, device)
        few = min(_FEW_IMAGES, batch_size)
        first = _time_each(network, CANDIDATES, image_shape, few, device)
        best = min(first.values())
        near = tuple(each for each in CANDIDATES if first[each] <= _NEAR * best)
        more = min(batch_size, few * max(1, int(_LONGEST_STEP_S / best)))
        second = _time_each(network, near, image_shape, more, device)
        # What those that were left out would take, by how much slower they were.
        scale = min(second[each] / first[each] for each in near)
        return {each: second.get(each, scale * first[each]) for each in CANDIDATES}


def _time_each(
    network: nn.Module,
    candidates: tuple[Kernels, ...],
    image_shape: tuple[int, ...],
    batch_size: int,
    device: torch.device,
) -> dict[Kernels, float]:
    """The shortest of some steps of each, in turn; the first of all allocates memory and chooses kernels."""
    steps = {each: _step(network, each, image_shape, batch_size, device) for each in candidates}
    seconds = dict.fromkeys(candidates, float("inf"))
    for turn in range(1 + _STEPS):
        for each, step in steps.items():
            found = _time(step, device)
            if turn:
                seconds[each] = min(seconds[each], found)
    return seconds


def _step(
    network: nn.Module, kernels: Kernels, image_shape: tuple[int, ...], batch_size: int, device: torch.device
) -> Callable[[], None]:
    """Forward and backward of a copy of the network on random images."""
    layout = torch.channels_last if kernels.channels_last else torch.contiguous_format
    own = copy.deepcopy(network).train().to(device=device, memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(batch_size, *image_shape, device=device).contiguous(memory_format=layout)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=device)

    def step() -> None:
        own.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=kernels.precision == "bf16-mixed"):
            loss = F.cross_entropy(own(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def _time(step: Callable[[], None], device: torch.device) -> float:
    start = perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def in_words(seconds: Mapping[Kernels, float]) -> str:
    """The fastest, and how many times as long a step of each of the others takes."""
    best = fastest(seconds)
    others = ", ".join(f"{each} {time / seconds[best]:.2f}x" for each, time in seconds.items() if each != best)
    return f"{best}; slower: {others}"


@contextmanager
def told_to_children(kernels: Kernels) -> Iterator[None]:
    """Let processes that are started meanwhile find it in their environment."""
    os.environ[VARIABLE] = str(kernels)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def told_by_parent() -> Kernels | None:
    """What the process that has started this one has found; None if it has not measured."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Kernels.parse(text)
