"""Random numbers: noted for each step, made to follow the step or the sample; and a model without those of dropout."""

import hashlib
import random
import zlib
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.checks.relations.patching import after, patched
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.remarks import IN_STEP, OF_BATCH
from lit_cifar.internals import temporarily_clear_interpreter_stack


def seed_all(*numbers: object) -> None:
    """Seed the generators of torch, NumPy and Python by these."""
    number = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "little")
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def states() -> tuple[Any, ...]:
    """The states of the generators of torch, NumPy and Python, which tell whether numbers were drawn."""
    of_numpy: Any = np.random.get_state()
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with temporarily_clear_interpreter_stack():  # of `vmap` and others, in which tensors show no values
        of_torch = (torch.get_rng_state(), *([torch.cuda.get_rng_state()] if is_used else []))
        own = b"".join(state.numpy().tobytes() for state in of_torch)
    return own, of_numpy[1].tobytes(), of_numpy[2], random.getstate()


class Draws:
    """Follows the generators from where a step begins."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._before: tuple[Any, ...] | None = None  # states of generators
        self._samples: list[int] | None = None  # digests of those of the batch
        self._count, self._is_before_step = 0, False  # draws for these samples; whether their step is to come
        self._is_drawing = False

    def follow_batch(self, samples: list[int] | None) -> None:
        """From now on a batch is trained; its `samples` are given if draws should follow them."""
        self._before, self._samples, self._count, self._is_before_step = states(), samples, 0, True

    def follow_call(self) -> None:
        """From now on a module is trained, perhaps without a batch of a loader."""
        self._before = self._before or states()

    def stop(self) -> None:
        self._before, self._samples, self._is_before_step = None, None, False

    def pause(self) -> None:
        """Up to `go_on` others draw: a module that is called without a gradient."""
        if self._is_before_step:
            self.note()

    def go_on(self) -> None:
        self._before = states() if self._is_before_step else None

    def follow_step(self, *, is_in_batch: bool) -> None:
        """From now on the step after one of the optimizer is trained."""
        self._before, self._is_before_step = states() if is_in_batch else None, False

    def note(self) -> None:
        """Note whether numbers were drawn since the beginning."""
        used = [] if self._before is None else [a for a, b in zip(self._before, states(), strict=True) if a != b]
        if used:
            self._trace.remarks.add(IN_STEP)
            self._trace.drawn.add(zlib.crc32(repr(used).encode()))

    def patch(self, remark: Callable[[], None]) -> None:
        """Let what torch draws for the samples of a batch be a function of each sample, however batches are divided.

        Without samples, or with another length, a draw stays as it is; `remark` is called if the generator is its own.
        """

        def drawn(draw: Any, *args: Any, **settings: Any) -> Any:
            """Where a mode gives functions another device, torch calls a method of a tensor once more, by its name."""
            is_inside, self._is_drawing = self._is_drawing, True
            try:
                return draw(*args, **settings) if is_inside else followed(draw, *args, **settings)
            finally:
                self._is_drawing = is_inside

        def followed(draw: Any, *args: Any, **settings: Any) -> Any:
            generators = [torch.default_generator, *torch.cuda.default_generators]
            before = [generator.get_state() for generator in generators]
            found: Tensor = draw(*args, **settings)
            self._count += 1
            samples = self._samples or []
            if not samples or not found.dim() or len(found) != len(samples):
                if settings.get("generator") is not None:
                    remark()
                return found
            device = found.device.index + 1 if found.is_cuda else 0
            generator = generators[device]
            with torch.no_grad():
                for place, sample in enumerate(samples):
                    generator.manual_seed(hash((self._trace.steps, self._count, sample)) % 2**63)
                    of_row = {name: _of_row(value, place, found) for name, value in settings.items()}
                    found[place] = draw(*(_of_row(value, place, found) for value in args), **of_row)[0]
            generator.set_state(before[device])
            return found

        def of_sizes(draw: Any, *sizes: Any, **settings: Any) -> Any:
            """Take the sizes as one argument, as the other functions do."""
            is_one = not sizes or isinstance(sizes[0], tuple | list)
            return drawn(draw, *(sizes if is_one else [sizes]), **settings)

        for name in ("rand", "randn"):
            patched(torch, name, of_sizes)
        for name in ("rand_like", "randn_like", "randint", "normal", "bernoulli"):
            patched(torch, name, drawn)
        for name in ("normal_", "uniform_", "bernoulli_", "exponential_"):
            patched(Tensor, name, drawn)


def _of_row(value: Any, place: int, whole: Tensor) -> Any:
    """An argument of a function that draws, for one row of what it has drawn."""
    if isinstance(value, Tensor):
        return value[place : place + 1] if value.dim() == whole.dim() and len(value) > 1 else value
    if isinstance(value, torch.Generator):
        return None
    return (1, *value[1:]) if isinstance(value, tuple | list) else value


def make_quiet(remark: Callable[[str], None]) -> None:
    """Turn dropout off, and let BatchNorm take its running statistics; `remark` a BatchNorm that has none.

    These are others by right where the same samples come in other batches.
    """
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        patched(F, name, lambda _, input, *args, **settings: input)
    patched(F, "scaled_dot_product_attention", _without_dropout)
    patched(F, "batch_norm", partial(_by_running_statistics, remark))
    patched(nn.SyncBatchNorm, "forward", lambda _, *args, **own: nn.BatchNorm1d.forward(*args, **own))
    patched("torch.nn.utils.spectral_norm:SpectralNorm", "compute_weight", lambda own, it, of, **_: own(it, of, False))
    iterates = ("torch.nn.utils.parametrizations:_SpectralNorm", "_power_method")
    patched(*iterates, lambda own, it, of, times: times > it.n_power_iterations and own(it, of, times))
    # accelerate advances a schedule once for each process, as each adds to the global batch.
    once = after(lambda schedule: setattr(schedule, "split_batches", True))
    patched("accelerate.scheduler:AcceleratedScheduler", "__init__", once)


def _without_dropout(attention: Any, *args: Any, dropout_p: float = 0.0, **settings: Any) -> Any:
    return attention(*args[:4], *(0.0 for _ in args[4:5]), *args[5:], **settings)


def _by_running_statistics(remark: Callable[[str], None], norm: Any, *args: Any, **settings: Any) -> Any:
    given = signature(norm).bind(*args, **settings)
    of_batch = given.arguments.get("training", False) and given.arguments["running_mean"] is None
    if of_batch:
        remark(OF_BATCH)
    given.arguments["training"] = of_batch
    return norm(*given.args, **given.kwargs)


def turn_dropout_off(module: nn.Module) -> None:
    """Turn off the dropout that layers hand to torch as a number."""
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
