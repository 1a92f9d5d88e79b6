"""A matrix product, a convolution and a sum over ranks that have one right answer on every device.

All values are small integers in float32. Every partial sum is an integer below 2**24, which float32, TF32 and bfloat16
products with float32 sums hold exactly, so the order of the additions does not matter. The convolution has stride 2:
for stride 1 libraries use Winograd's algorithm or Fourier transforms, which round.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

OPERATIONS = ("matmul", "convolution")
# Side of the matrices, images and channels of the convolution: about a millisecond on a core, less on a GPU.
_SIZES = {"cpu": (256, 4, 64), "cuda": (2048, 16, 256)}
_IMAGE_SIDE = 32
_LARGEST = 8
_PERIOD = 251  # of the pattern; a prime, so that a block that arrives in the wrong place is seen
_STEP = 7


@dataclass(frozen=True, eq=False)
class Operation:
    """A computation with its inputs in float32."""

    name: str  # one of `OPERATIONS`
    left: Tensor  # (n, n), or images (n, c, h, w)
    right: Tensor  # (n, n), or filters (c, c, 3, 3)

    def run(self) -> Tensor:
        """The result, on the device of the inputs."""
        if self.name == "matmul":
            return self.left @ self.right
        return F.conv2d(self.left, self.right, stride=2, padding=1)

    def to(self, other: torch.device | torch.dtype) -> "Operation":
        """With its inputs on a device, or of a type."""
        return Operation(self.name, self.left.to(other), self.right.to(other))

    @cached_property
    def expected(self) -> Tensor:
        """What the host's processor calculates in float64; float32 holds it."""
        return self.to(torch.device("cpu")).to(torch.float64).run().float()


def operations(device: torch.device) -> list[Operation]:
    """Both computations, with inputs on `device`."""
    side, num_images, channels = _SIZES[device.type]
    images, filters = (num_images, channels, _IMAGE_SIDE, _IMAGE_SIDE), (channels, channels, 3, 3)
    return [
        Operation("matmul", _integers((side, side), salt=1), _integers((side, side), salt=2)).to(device),
        Operation("convolution", _integers(images, salt=3), _integers(filters, salt=4)).to(device),
    ]


def _integers(shape: tuple[int, ...], *, salt: int) -> Tensor:
    """Integers from -8 to 8 that look random, from a hash of their place (D. Knuth's multiplicative one)."""
    place = torch.arange(torch.Size(shape).numel()) + (salt << 24)
    mixed = (place * 2654435761) % 2**32 // 2**15
    return (mixed % (2 * _LARGEST + 1) - _LARGEST).float().reshape(shape)


def pattern(num_values: int, *, call: int, device: torch.device) -> Tensor:
    """What all ranks send multiples of in the call of that number; no value is that of the call before."""
    return ((torch.arange(num_values, device=device) + _STEP * call) % _PERIOD + 1).float()


def fault(found: Tensor, expected: Tensor) -> str:
    """In words, where `found` differs from what is right; "" if it does not."""
    found = found.to(expected.device)
    places = (found != expected).flatten().nonzero().flatten()
    if not len(places):
        return ""
    value, right = (float(tensor.flatten()[places[0]]) for tensor in (found, expected))
    return f"{len(places)} of {found.numel()} values, the first is {value:.9g} in place of {right:.9g}"
