"""Random numbers that are a pure function of a key and a sample's id, with no generator to carry along.

The n-th output of the SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014) depends only on its seed and n. With a seed made from (seed, epoch, purpose) and n = sample id, any process
draws the number of any sample without drawing the others, and integer arithmetic makes CPU and GPU agree bit for bit.
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, give the idea its name: counter-based.
"""

from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor


class Purpose(IntEnum):
    """The use of a random number: equal keys with different purposes give independent numbers."""

    SPLIT = 1
    ORDER = 2
    CROP_ROW = 3
    CROP_COLUMN = 4
    FLIP = 5
    CUTOUT_ROW = 6
    CUTOUT_COLUMN = 7
    NETWORK = 8
    MIX = 10
    BALANCE = 11
    TRANSFORMS = 12


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # int64 tensors wrap around as the generator's uint64 does
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def keyed_bits(ids: Tensor, *, seed: int, epoch: int, purpose: Purpose) -> Tensor:
    """64 random bits, int64, for each of `ids` (int64, not negative), on their device; `seed` has 63 bits at most."""
    return _mix((ids + 1) * _GOLDEN + key_of(seed, epoch, int(purpose)))


def key_of(*words: int) -> int:
    """64 random bits for a row of integers, as a Python integer in the range of int64."""
    key = 0
    for word in words:
        key = (_mix((key ^ word) + _GOLDEN) + 2**63) % 2**64 - 2**63  # the low 64 bits, as an int64 has them
    return key


def keyed_integers(ids: Tensor, bound: int, *, seed: int, epoch: int, purpose: Purpose) -> Tensor:
    """One int64 in `range(bound)` for each id (Lemire, 2019; bias below bound / 2**31)."""
    bits = keyed_bits(ids, seed=seed, epoch=epoch, purpose=purpose)
    return (_shift_right(bits, 33) * bound) >> 31


def keyed_permutation(num_samples: int, *, seed: int, epoch: int, purpose: Purpose) -> Tensor:
    """A permutation of `range(num_samples)`, int64, (num_samples,): the ids sorted by their random bits."""
    bits = keyed_bits(torch.arange(num_samples), seed=seed, epoch=epoch, purpose=purpose)
    return torch.argsort(bits, stable=True)


_Word = TypeVar("_Word", int, Tensor)


def _mix(z: _Word) -> _Word:
    """SplitMix64's finaliser, on int64, or on the low 64 bits of Python's unbounded integers."""
    z = (z ^ _shift_right(z, 30)) * _MULTIPLIERS[0]
    z = (z ^ _shift_right(z, 27)) * _MULTIPLIERS[1]
    return z ^ _shift_right(z, 31)


def _shift_right(z: _Word, places: int) -> _Word:
    """Logical shift: int64's own is arithmetic and drags the sign bit along."""
    return (z >> places) & ((1 << (64 - places)) - 1)
