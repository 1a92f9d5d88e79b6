"""Digests of tensors, and the states of random generators and of torch that a computation depends on."""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pickle import HIGHEST_PROTOCOL, Pickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_cifar.checks.repeated_step.sharded import whole
from lit_cifar.checks.repeated_step.tensors import as_real


class Digest(NamedTuple):
    """Equal tensors have equal `bits`, with +0.0 and -0.0 taken as one; `norm` is for people."""

    bits: int
    norm: float


def digest(value: Any) -> Digest:
    """Digest of a tensor's values, of all of them if ranks divide it; of any other value its `repr`."""
    if not isinstance(value, Tensor):
        return Digest(zlib.crc32(repr(value).encode()), 0.0)
    plain = as_real(dense(whole(value).detach())).contiguous()
    if plain.is_floating_point():
        plain = plain + 0.0
    norm = float(torch.linalg.vector_norm(plain.double()))
    bits = zlib.crc32(plain.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return Digest(zlib.crc32(repr((plain.dtype, plain.shape)).encode(), bits), norm)


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself, with the zeros of a sparse one, and in memory what a complex one is the conjugate of."""
    whole = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return whole.resolve_conj().resolve_neg()


class _Checksum:
    """A file that keeps only a checksum of its content; it raises an `EOFError` when that is much."""

    def __init__(self) -> None:
        self.value, self._left = 0, 2**26

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.value = zlib.crc32(view[: self._left], self.value)
        self._left -= len(view)
        if self._left <= 0:
            raise EOFError


class _Heads(Pickler):
    """Writes the first rows of a tensor in its place: torch would copy it as a whole."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim():
            return str, (repr((value.shape, digest(value[:64]).bits)),)
        return NotImplemented


def checksum(value: Any) -> int | None:
    """Checksum of the first 64 MiB of an object's pickle, with 64 rows of each tensor; None without a pickle."""
    file = _Checksum()
    try:
        with suppress(EOFError):
            _Heads(file, HIGHEST_PROTOCOL).dump(value)
    except Exception:  # a stranger's class may raise anything
        return None
    return file.value


@dataclass(frozen=True)
class Surroundings:
    """Settings that decide a computation beside its inputs: random generators, autocast, default dtype, threads."""

    python: Any
    numpy: Any  # a tuple whose words are a list
    cpu: Tensor
    accelerator: Tensor | None
    autocast: tuple[bool, torch.dtype, bool]  # whether it is on, its dtype, and whether it keeps casts of weights
    default_dtype: torch.dtype
    num_threads: int

    @classmethod
    def now(cls, device: torch.device) -> "Surroundings":
        kind = device.type
        state: Any = np.random.get_state()
        name, words, *rest = state
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(
            python=random.getstate(),
            numpy=(name, words.tolist(), *rest),
            cpu=torch.get_rng_state(),
            accelerator=torch.cuda.get_rng_state(device) if kind == "cuda" else None,
            autocast=(is_on, dtype, torch.is_autocast_cache_enabled()),
            default_dtype=torch.get_default_dtype(),
            num_threads=torch.get_num_threads(),
        )

    def generators(self) -> tuple[int, ...]:
        """Digests of the states of the generators that a data set may use."""
        return digest(self.cpu).bits, digest(self.python).bits, digest(self.numpy).bits

    def has_drawn(self, device: torch.device) -> bool:
        """Whether torch's generators have been used since then."""
        now = Surroundings.now(device)
        pairs = [(self.cpu, now.cpu), (self.accelerator, now.accelerator)]
        return any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)

    def restore(self, device: torch.device) -> None:
        """Set all but autocast as they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu.cpu())
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator.cpu(), device)
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.default_dtype)

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Return a context with all as they were. It puts back only the default dtype; the caller restores the rest."""
        default_dtype = torch.get_default_dtype()
        self.restore(device)
        enabled, dtype, cached = self.autocast
        try:
            with torch.enable_grad(), torch.autocast(device.type, dtype, enabled, cached):
                yield
        finally:
            torch.set_default_dtype(default_dtype)
