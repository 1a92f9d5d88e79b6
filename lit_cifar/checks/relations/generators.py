"""Random numbers: noted for each step, made to follow the step or the sample; and a model without those of dropout."""

import hashlib
import random
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.checks.relations.patching import after, patched, when_imported
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.ranks import Drawn
from lit_cifar.checks.relations.remarks import IN_STEP, OF_BATCH


def seed_all(*numbers: object) -> None:
    """Seed the generators of torch, NumPy and Python by these."""
    number = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "little")
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def states() -> tuple[Any, ...]:
    """The states of the generators of torch, NumPy and Python, which tell whether numbers were drawn."""
    of_numpy = np.random.get_state()
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (
        torch.get_rng_state().numpy().tobytes(),
        (of_numpy[1].tobytes(), of_numpy[2]),  # type: ignore[index]
        random.getstate(),
        torch.cuda.get_rng_state().numpy().tobytes() if is_used else b"",
    )


class Draws:
    """Follows the generators from where a step begins."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._before: tuple[Any, ...] | None = None  # states of generators
        self._samples: list[int] | None = None  # digests of those of the batch
        self._count = 0  # of draws for these samples

    def follow_batch(self, samples: list[int] | None) -> None:
        """From now on a batch is trained; its `samples` are given if draws should follow them."""
        self._before, self._samples, self._count = states(), samples, 0

    def follow_call(self) -> None:
        """From now on a module is trained, perhaps without a batch of a loader."""
        if self._before is None:
            self._before = states()

    def stop(self) -> None:
        self._before = self._samples = None

    def follow_step(self, *, is_in_batch: bool) -> None:
        """From now on the step after one of the optimizer is trained."""
        self._before = states() if is_in_batch else None

    def note(self) -> None:
        """Note whether numbers were drawn since the beginning."""
        used = [] if self._before is None else [a for a, b in zip(self._before, states(), strict=True) if a != b]
        if used:
            self._trace.remarks.add(IN_STEP)
            self._trace.part(Drawn).states.add(zlib.crc32(repr(used).encode()))

    def key(self) -> tuple[int, list[int]] | None:
        """What a random number for each sample of this batch follows from: the step, the draw, and the sample."""
        if self._samples is None:
            return None
        self._count += 1
        return hash((self._trace.steps, self._count)), self._samples


def draw_by_sample(key: Callable[[], tuple[int, Sequence[int]] | None], remark: Callable[[], None]) -> None:
    """Let what torch draws for the samples of a batch be a function of each sample, however batches are divided.

    `key` gives a number, another for each call, and digests of the batch's samples. Without them, and where dimension 0
    has another length, a draw stays as it is; `remark` is called where its generator is the script's own.
    """

    def rows(draw: Any, like: Tensor) -> Tensor | None:
        found = key()
        if found is None or not like.dim() or len(like) != len(found[1]):
            return None
        number, samples = found
        made = [torch.Generator().manual_seed(hash((number, sample)) % 2**63) for sample in samples]
        return torch.stack([draw(like.shape[1:], generator=of_row, dtype=torch.float64) for of_row in made])

    def by_rows(draw: Any, finish: Callable[..., Tensor]) -> Callable[..., Any]:
        def drawn(own: Any, *args: Any, **settings: Any) -> Any:
            before = torch.get_rng_state()
            as_it_is = own(*args, **settings)
            if (of_rows := rows(draw, as_it_is)) is None:
                if settings.get("generator") is not None:
                    remark()
                return as_it_is
            torch.set_rng_state(before)
            with torch.no_grad():
                return as_it_is.copy_(finish(of_rows, *args, **settings))

        return drawn

    normal, uniform = torch.randn, torch.rand
    for name in ("randn", "randn_like"):
        patched(torch, name, by_rows(normal, lambda of_rows, *_, **__: of_rows))
    for name in ("rand", "rand_like"):
        patched(torch, name, by_rows(uniform, lambda of_rows, *_, **__: of_rows))
    patched(torch, "randint", by_rows(uniform, _whole_numbers))
    patched(torch, "normal", by_rows(normal, _normal))
    patched(torch, "bernoulli", by_rows(uniform, lambda of_rows, chance, *_, **__: of_rows < chance))
    patched(Tensor, "normal_", by_rows(normal, lambda of_rows, _, *args, **own: _normal(of_rows, *args, **own)))
    patched(Tensor, "uniform_", by_rows(uniform, _between))


def _whole_numbers(of_rows: Tensor, *args: Any, **settings: Any) -> Tensor:
    numbers = [value for value in (*args, settings.get("low"), settings.get("high")) if isinstance(value, int)]
    low, high = numbers if len(numbers) > 1 else (0, *numbers)
    return (of_rows * (high - low)).floor() + low


def _normal(of_rows: Tensor, mean: Any = 0.0, std: Any = 1.0, *_: Any, **__: Any) -> Any:
    return of_rows * std + mean


def _between(of_rows: Tensor, _: Tensor, low: float = 0.0, high: float = 1.0, **settings: float) -> Tensor:
    low, high = settings.get("from", low), settings.get("to", high)
    return of_rows * (high - low) + low


def make_quiet(remark: Callable[[str], None]) -> None:
    """Turn dropout off, and let BatchNorm take its running statistics; `remark` a BatchNorm that has none.

    These are others by right where the same samples come in other batches.
    """
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        patched(F, name, lambda _, input, *args, **settings: input)
    patched(F, "scaled_dot_product_attention", _without_dropout)
    patched(F, "batch_norm", partial(_by_running_statistics, remark))
    patched(nn.SyncBatchNorm, "forward", lambda _, *args, **own: nn.BatchNorm1d.forward(*args, **own))
    # accelerate advances a schedule once for each process, as each adds to the global batch.
    once = after(lambda schedule: setattr(schedule, "split_batches", True))
    when_imported("accelerate.scheduler", lambda module: patched(module.AcceleratedScheduler, "__init__", once))


def _without_dropout(attention: Any, *args: Any, dropout_p: float = 0.0, **settings: Any) -> Any:
    return attention(*args[:4], **settings)


def _by_running_statistics(
    remark: Callable[[str], None],
    norm: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    of_batch = training and running_mean is None
    if of_batch:
        remark(OF_BATCH)
    return norm(input, running_mean, running_var, weight, bias, of_batch, momentum, eps)


def turn_dropout_off(module: nn.Module) -> None:
    """Turn off the dropout that layers hand to torch as a number."""
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
