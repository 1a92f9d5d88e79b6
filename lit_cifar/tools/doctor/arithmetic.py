"""A matrix product, a convolution and a sum over ranks that have one right answer on every device.

All values are small integers in float32. Every partial sum is an integer below 2**24, which float32, TF32 and bfloat16
products with float32 sums hold exactly, so the order of the additions does not matter. The convolution has stride 2:
for stride 1 libraries use Winograd's algorithm or Fourier transforms, which round.

In the sum, rank r sends r + 1 times a pattern that changes with every call, so a wrong sum says what is missing.
"""

import hashlib
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

OPERATIONS = ("matmul", "convolution")
# Side of the matrices, images and channels of the convolution: about a millisecond on a core, less on a GPU.
_SIZES = {"cpu": (256, 4, 64), "cuda": (2048, 16, 256)}
_IMAGE_SIDE = 32
_LARGEST = 8

RIGHT = {
    "cpu": {
        "matmul": "3c06daef00067c6ed79802f99417a5efbb9d05dbb2f3839fc74c44e650989832",
        "convolution": "53a8b534673d04ebe904cea8a1e60471bec6fd26e5ff1ede901597c1473128b9",
    },
    "cuda": {
        "matmul": "e173fee91074bb028ecbd10895ec3e1aee70fbf6ef45cff769e4620dba71d406",
        "convolution": "8c9cb1f6aecf7d3f75ead4a5a24b46619b30ad570f99ee4e6d65ea199b35ebbe",
    },
}
"""SHA-256 of the right results on each type of device, calculated in integers (see `tests/test_doctor.py`)."""
_PERIOD = 251  # of the pattern; a prime, so that a block that arrives in the wrong place is seen
_STEP = 7


@dataclass(frozen=True, eq=False)
class Operation:
    """A computation with its inputs in float32."""

    name: str  # one of `OPERATIONS`
    left: Tensor  # (n, n), or images (n, c, h, w)
    right: Tensor  # (n, n), or filters (c, c, 3, 3)

    def to(self, device: torch.device) -> "Operation":
        """With its inputs on `device`."""
        return Operation(self.name, self.left.to(device), self.right.to(device))

    def run(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The result, on the device of the inputs."""
        left, right = self.left.to(dtype), self.right.to(dtype)
        return left @ right if self.name == "matmul" else F.conv2d(left, right, stride=2, padding=1)

    def fault(self, result: Tensor) -> str:
        """In words, where `result` is not what the host's processor calculates in float64; "" if it is right."""
        digest = hashlib.sha256((result.cpu() + 0.0).numpy().astype("<f4").tobytes()).hexdigest()  # -0.0 is 0.0
        if digest == RIGHT[self.left.device.type][self.name]:
            return ""
        expected = self.to(torch.device("cpu")).run(torch.float64).flatten()
        found = result.cpu().double().flatten()
        wrong = (found != expected).nonzero().flatten()
        if not len(wrong):
            return "the inputs, which the host's processor has made"
        first = int(wrong[0])
        return f"{len(wrong)} of {len(found)} values, the first is {found[first]:.9g} in place of {expected[first]:.9g}"


@cache
def operations(device_type: str) -> tuple[Operation, ...]:
    """Both computations for "cpu" or "cuda", with inputs on the CPU."""
    side, num_images, channels = _SIZES[device_type]
    images, filters = (num_images, channels, _IMAGE_SIDE, _IMAGE_SIDE), (channels, channels, 3, 3)
    return (
        Operation("matmul", _integers((side, side), salt=1), _integers((side, side), salt=2)),
        Operation("convolution", _integers(images, salt=3), _integers(filters, salt=4)),
    )


def _integers(shape: tuple[int, ...], *, salt: int) -> Tensor:
    """Integers from -8 to 8 that look random, from a hash of their place (D. Knuth's multiplicative one)."""
    place = torch.arange(torch.Size(shape).numel()) + (salt << 24)
    mixed = (place * 2654435761) % 2**32 // 2**15
    return (mixed % (2 * _LARGEST + 1) - _LARGEST).float().reshape(shape)


def pattern(num_values: int, *, call: int, device: torch.device) -> Tensor:
    """What all ranks send multiples of in the call of that number; no value is that of the call before."""
    return ((torch.arange(num_values, device=device) + _STEP * call) % _PERIOD + 1).float()


def sum_fault(result: Tensor, *, call: int, rank: int, world_size: int) -> str:
    """What is wrong, in words, with the sum that `rank` holds after the call of that number; "" if nothing is."""
    whole = world_size * (world_size + 1) // 2
    now, before = (pattern(len(result), call=number, device=result.device) for number in (call, call - 1))
    places = (result != whole * now).nonzero().flatten()
    num_wrong = len(places)
    if not num_wrong:
        return ""
    causes = [(f"the values of rank {other} are missing", whole - other - 1, now) for other in range(world_size)]
    causes += [("the values of all other ranks are missing", rank + 1, now)]
    causes += [("it is the result of the call before", whole, before)]
    found = result[places]
    fitting = (cause for cause, multiple, sent in causes if torch.equal(found, multiple * sent[places]))
    where = "" if num_wrong == len(result) else f", in {num_wrong} of {len(result)} places from {int(places[0])} on"
    return next(fitting, "it holds numbers that no rank has sent") + where
