"""`--autotune=true`: the precision and the memory format that train a network fastest on this machine.

Which these are depends on processor and network. bfloat16 halves the speed of one CPU and doubles that of another, and
channels-last helps in one precision and not in the other. So each is timed for some steps, by one process before it
starts others.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from jsonargparse import Namespace
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.configured import made
from lit_cifar.errors import ConfigError
from lit_cifar.launch.malloc_tuning import keep_freed_memory
from lit_cifar.models import build_network, stem_of
from lit_cifar.models.precision import cpu_has_bf16

Precision = Literal["32-true", "bf16-mixed"]
VARIABLE = "LIT_CIFAR_AUTOTUNE"  # the parent's choice, for the processes that a run starts
_STEPS = 2  # number of steps that are timed for each candidate
_FEW_IMAGES = 4
_NEAR = 2.0  # a precision that takes this many times the shortest step on few images is left out


@dataclass(frozen=True)
class Candidate:
    """A setting, by which torch chooses its kernels for a training step."""

    precision: Precision  # a value of `--trainer.precision`
    channels_last: bool  # a value of `--model.channels_last`

    def __str__(self) -> str:
        return f"{self.precision} channels_last" if self.channels_last else self.precision


CANDIDATES = tuple(Candidate(precision, layout) for precision in get_args(Precision) for layout in (False, True))


def autotune(
    arguments: Namespace, *, batch_size: Callable[[], int], before: Mapping[str, Any]
) -> tuple[Candidate, dict[str, float]]:
    """The fastest candidate, written into `arguments` as `--trainer.precision` and `--model.channels_last`.

    A run that is resumed keeps the candidate that it had `before`, because others round differently; that is empty for
    a new run. The seconds of a step are
    returned too, by candidate; none if nothing was measured here. `batch_size` returns how many images pass a layer at
    once.
    """
    seconds: dict[Candidate, float] = {}
    by_name = {str(each): each for each in CANDIDATES}
    chosen = by_name.get(os.environ.get(VARIABLE, "")) or _of_resumed(before)
    if chosen is None:
        seconds = _measure(arguments, batch_size)
        chosen = min(seconds, key=lambda each: seconds[each])  # the first of equals
    arguments.trainer.precision = chosen.precision
    arguments.model.channels_last = chosen.channels_last
    return chosen, {str(each): second for each, second in seconds.items()}


def _of_resumed(before: Mapping[str, Any]) -> Candidate | None:
    """The candidate that a run with these settings has been trained with; None if they do not say."""
    try:
        return Candidate(before["trainer"]["precision"], bool(before["model"]["channels_last"]))
    except (KeyError, TypeError):
        return None


def _measure(arguments: Namespace, batch_size: Callable[[], int]) -> dict[Candidate, float]:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            "--autotune=true measures before a run starts its processes, and torchrun or srun has started them already",
            remedy="run fit once without it, and pass the --trainer.precision and --model.channels_last that its "
            "config.yaml has",
        )
    model = arguments.model
    sizes = {"num_classes": model.num_classes, "image_size": model.image_size}
    with torch.random.fork_rng():
        if model.network is None:
            network = build_network(model.arch, stem=stem_of(model.arch, model.stem), **sizes)
        else:
            network = made(model.network)
    has_gpu = torch.cuda.is_available() and arguments.trainer.accelerator != "cpu"
    if not has_gpu:
        keep_freed_memory()  # the run will do so too
    return time_candidates(
        network,
        (3, model.image_size, model.image_size),
        batch_size=batch_size(),
        device=torch.device("cuda" if has_gpu else "cpu"),
    )


def time_candidates(
    network: nn.Module, image_shape: tuple[int, ...], *, batch_size: int, device: torch.device
) -> dict[Candidate, float]:
    """Seconds of forward and backward of the network for each of `CANDIDATES`, the shortest of some steps.

    On a CPU a precision that is much slower on few images is left out of the comparison; bfloat16 is not even tried
    there without instructions for it. Memory formats are compared on whole batches: which is faster depends on their
    size. Neither the network, which returns logits (n, num_classes), nor torch's global generators change.

    `image_shape` is channels, height and width, `batch_size` the number of images that pass a layer at once.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        images = torch.randn(batch_size, *image_shape, device=device)
        if device.type != "cpu":
            return _time_each(network, CANDIDATES, images)
        candidates = tuple(each for each in CANDIDATES if each.precision == "32-true" or cpu_has_bf16())
        first = _time_each(network, candidates, images[:_FEW_IMAGES])
        near = {each.precision for each in candidates if first[each] <= _NEAR * min(first.values())}
        left = tuple(each for each in candidates if each.precision in near)
        second = _time_each(network, left, images)
        # Candidates that were left out would be slower by the same factor as on few images.
        scale = min(second[each] / first[each] for each in left)
        return {each: second.get(each, scale * first[each]) for each in candidates}


def _time_each(network: nn.Module, candidates: tuple[Candidate, ...], images: Tensor) -> dict[Candidate, float]:
    """The shortest of some steps of each, in turn; the first of all allocates memory and chooses kernels."""
    steps = {each: _step(network, each, images) for each in candidates}
    seconds = dict.fromkeys(candidates, float("inf"))
    for turn in range(1 + _STEPS):
        for each, step in steps.items():
            start = perf_counter()
            step()
            if images.is_cuda:
                torch.cuda.synchronize(images.device)
            if turn:
                seconds[each] = min(seconds[each], perf_counter() - start)
    return seconds


def _step(network: nn.Module, setting: Candidate, images: Tensor) -> Callable[[], None]:
    """Forward and backward of a copy of the network on `images`."""
    layout = torch.channels_last if setting.channels_last else torch.contiguous_format
    own = copy.deepcopy(network).train().to(device=images.device, memory_format=layout)  # type: ignore[call-overload]
    images = images.contiguous(memory_format=layout)
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)

    def step() -> None:
        own.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=setting.precision == "bf16-mixed"):
            loss = F.cross_entropy(own(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]

    return step


@contextmanager
def exported(chosen: Candidate) -> Iterator[None]:
    """Return a context in which new processes find the chosen candidate in their environment."""
    os.environ[VARIABLE] = str(chosen)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
