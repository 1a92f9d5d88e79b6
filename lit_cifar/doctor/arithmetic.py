"""A matrix product and a convolution that have one right answer on every device.

All values are small integers in float32. Every partial sum is an integer below 2**24, which float32, TF32 and bfloat16
products with float32 sums hold exactly, so the order of the additions does not matter. The convolution has stride 2:
for stride 1 libraries use Winograd's algorithm or Fourier transforms, which round.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Accelerator = Literal["cpu", "cuda"]
OPERATIONS = ("matmul", "convolution")
# Side of the matrices, images and channels of the convolution: about a millisecond on a core, less on a GPU.
_SIZES: dict[Accelerator, tuple[int, int, int]] = {"cpu": (256, 4, 64), "cuda": (2048, 16, 256)}
_IMAGE_SIDE = 32
_LARGEST = 8

RIGHT: dict[Accelerator, dict[str, str]] = {
    "cpu": {
        "matmul": "3c06daef00067c6ed79802f99417a5efbb9d05dbb2f3839fc74c44e650989832",
        "convolution": "53a8b534673d04ebe904cea8a1e60471bec6fd26e5ff1ede901597c1473128b9",
    },
    "cuda": {
        "matmul": "e173fee91074bb028ecbd10895ec3e1aee70fbf6ef45cff769e4620dba71d406",
        "convolution": "8c9cb1f6aecf7d3f75ead4a5a24b46619b30ad570f99ee4e6d65ea199b35ebbe",
    },
}
"""Digests of the right results, calculated in integers (see `tests/test_doctor.py`)."""


@dataclass(frozen=True, eq=False)
class Operation:
    """A computation with its inputs.

    Attributes:
        name: One of `OPERATIONS`.
        left: Float32 (n, n), or images (n, c, h, w).
        right: Float32 (n, n), or filters (c, c, 3, 3).
    """

    name: str
    left: Tensor
    right: Tensor

    def to(self, device: torch.device) -> "Operation":
        """With its inputs on `device`."""
        return Operation(self.name, self.left.to(device), self.right.to(device))

    def run(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The result, on the device of the inputs."""
        left, right = self.left.to(dtype), self.right.to(dtype)
        if self.name == "matmul":
            return left @ right
        return F.conv2d(left, right, stride=2, padding=1)


@cache
def operations(accelerator: Accelerator) -> tuple[Operation, ...]:
    """Both computations, with inputs on the CPU."""
    side, num_images, channels = _SIZES[accelerator]
    images, filters = (num_images, channels, _IMAGE_SIDE, _IMAGE_SIDE), (channels, channels, 3, 3)
    return (
        Operation("matmul", _integers((side, side), salt=1), _integers((side, side), salt=2)),
        Operation("convolution", _integers(images, salt=3), _integers(filters, salt=4)),
    )


def digest(result: Tensor) -> str:
    """SHA-256 of float32 values; 0.0 and -0.0 are the same."""
    return hashlib.sha256((result.cpu() + 0.0).numpy().astype("<f4").tobytes()).hexdigest()


def difference(result: Tensor, operation: Operation) -> str:
    """In words, where `result` is not what the host's processor calculates in float64; "" if they are equal."""
    expected = operation.to(torch.device("cpu")).run(torch.float64).flatten()
    found = result.cpu().double().flatten()
    wrong = (found != expected).nonzero().flatten()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return f"{len(wrong)} of {len(found)} values, the first is {found[first]:.9g} in place of {expected[first]:.9g}"


def _integers(shape: tuple[int, ...], *, salt: int) -> Tensor:
    """Integers from -8 to 8 that look random, from a hash of their place (D. Knuth's multiplicative one)."""
    place = torch.arange(torch.Size(shape).numel()) + (salt << 24)
    mixed = (place * 2654435761) % 2**32 // 2**15
    return (mixed % (2 * _LARGEST + 1) - _LARGEST).float().reshape(shape)
