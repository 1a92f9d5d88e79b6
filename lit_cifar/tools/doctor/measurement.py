"""What one of the doctor's processes measures: its arithmetic, its speed, and all-reduces with the others.

A matrix product, a convolution and a sum over ranks have one right answer on every device: all values are small
integers in float32. Every partial sum is an integer below 2**24, which float32, TF32 and bfloat16 products with float32
sums hold exactly, so the order of the additions does not matter. The convolution has stride 2: for stride 1 libraries
use Winograd's algorithm or Fourier transforms, which round.

Run as `python -m lit_cifar.tools.doctor.measurement cpu|cuda FOLDER` with the environment variables that torchrun sets.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lit_cifar.launch.rendezvous import LocalEnvironment
from lit_cifar.launch.signals import destroy_process_group_at_exit
from lit_cifar.launch.startup import exit_with_parent

OPERATIONS = ("matmul", "convolution")
# Side of the matrices, images and channels of the convolution: about a millisecond on a core, less on a GPU.
_SIZES = {"cpu": (256, 4, 64), "cuda": (2048, 16, 256)}
_IMAGE_SIDE = 32
_PERIOD = 251  # of the pattern; a prime, so that a block that arrives in the wrong place is seen
_STEP = 7

SIZES = tuple(1024 * 8**power for power in range(6))
"""Of all-reduces, in bytes: 1 KiB to 32 MiB."""
NUM_CALLS = 5  # of each size
_TIMEOUT = timedelta(seconds=30)
_NUM_TURNS = 7
T = TypeVar("T")


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
        Operation("matmul", _integers((side, side), seed=1), _integers((side, side), seed=2)).to(device),
        Operation("convolution", _integers(images, seed=3), _integers(filters, seed=4)).to(device),
    ]


def _integers(shape: tuple[int, ...], *, seed: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


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


class Device:
    """What a rank computes with and communicates through. Tests pass one with a fault."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """The model of the GPU, or "CPU"."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def run(self, operation: Operation) -> Tensor:
        """The result of an operation whose inputs are on this device."""
        return operation.run()

    def all_reduce(self, values: Tensor) -> None:
        """Replace the values by their sum over all ranks."""
        dist.all_reduce(values)

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """The seconds until the result of `call` has been computed, and the result."""
        self._wait()
        begin = perf_counter()
        result = call()
        self._wait()
        return perf_counter() - begin, result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(kw_only=True)
class Measurement:
    """Of one rank."""

    rank: int
    device: str  # its model
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of each operation, turn by turn
    wrong: dict[str, list[str]] = field(default_factory=dict)  # of each operation, a text for each wrong result
    sweep: dict[int, list[float]] = field(default_factory=dict)  # seconds of all-reduce calls, by bytes
    faults: list[tuple[int, str]] = field(default_factory=list)  # wrong results of all-reduce: bytes, and a text


def measure(device: Device, *, rank: int, world_size: int, report: Callable[[str], object]) -> Measurement:
    """Measure as `rank`, together with the others; `report` is called with what comes next."""
    found = Measurement(rank=rank, device=device.name)
    for operation in operations(device.device):
        report(f"the {operation.name}")
        _calculate(found, device, operation, world_size=world_size)
    for num_bytes in SIZES if world_size > 1 else ():
        report(f"an all-reduce of {num_bytes:,} bytes")
        _all_reduce(found, device, num_bytes, world_size=world_size)
    return found


def _calculate(found: Measurement, device: Device, operation: Operation, *, world_size: int) -> None:
    """Time an operation while the other ranks are idle, and check each result. The first, untimed, warms up."""
    faults = [fault(device.run(operation), operation.expected)]
    seconds = found.seconds[operation.name] = []
    for turn in range(_NUM_TURNS * world_size):
        dist.barrier()
        if turn % world_size == found.rank:
            took_s, result = device.timed(partial(device.run, operation))
            seconds.append(took_s)
            faults.append(fault(result, operation.expected))
    found.wrong[operation.name] = [each for each in faults if each]


def _all_reduce(found: Measurement, device: Device, num_bytes: int, *, world_size: int) -> None:
    """Rank r sends r + 1 times a pattern that changes with every call, so that an old result is a wrong one."""
    seconds = found.sweep[num_bytes] = []
    for call in range(NUM_CALLS):
        sent = pattern(num_bytes // 4, call=call, device=device.device)
        values = sent * (found.rank + 1)
        seconds.append(device.timed(partial(device.all_reduce, values))[0])
        if problem := fault(values, sent * (world_size * (world_size + 1) // 2)):
            found.faults.append((num_bytes, problem))


def main(make_device: Callable[[torch.device, int], Device] = lambda device, rank: Device(device)) -> None:
    """Meet the other ranks, measure as the one that the environment names, and write what was found to a file."""
    exit_with_parent()
    device_type, folder = sys.argv[1], Path(sys.argv[2])
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    phase = folder / f"rank{rank}.phase"
    phase.write_text("the meeting of the processes")
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    try:
        _join(device, rank=rank, world_size=world_size)
        found = measure(make_device(device, rank), rank=rank, world_size=world_size, report=phase.write_text)
        phase.write_text("the end")
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        destroy_process_group_at_exit()
    torch.save(asdict(found), folder / f"rank{rank}.pt")


def _join(device: torch.device, *, rank: int, world_size: int) -> None:
    """NCCL between GPUs, gloo between CPUs; as in `fit`, the ports are on the loopback interface."""
    environment = LocalEnvironment()
    place = f"tcp://{environment.main_address}:{environment.main_port}"
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=place,
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
        device_id=device if is_gpu else None,
    )


if __name__ == "__main__":
    main()
