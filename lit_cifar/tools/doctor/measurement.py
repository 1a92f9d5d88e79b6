"""Measurement by one of the doctor's processes: its arithmetic, its speed, and all-reduces with the others.

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
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lit_cifar.launch.rendezvous import LocalEnvironment
from lit_cifar.launch.signals import destroy_process_group_at_exit

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": torch.matmul,
    "convolution": partial(F.conv2d, stride=2, padding=1),
}
# Side of the matrices, images and channels of the convolution: about a millisecond on a core, less on a GPU.
_SIZES = {"cpu": (256, 4, 64), "cuda": (2048, 16, 256)}
_IMAGE_SIDE = 32
_PERIOD = 251  # period of the pattern, a prime, so that a block in the wrong place is seen
_STEP = 7

SIZES = tuple(1024 * 8**power for power in range(6))
"""Sizes of all-reduces in bytes: 1 KiB to 32 MiB."""
NUM_CALLS = 5  # number of all-reduces of each size
_TIMEOUT = timedelta(seconds=30)
_NUM_TURNS = 7
T = TypeVar("T")


def inputs(operation: str, accelerator: str) -> tuple[Tensor, Tensor]:
    """Operands of an operation, float32 on the CPU: two matrices, or images and filters."""
    side, num_images, channels = _SIZES[accelerator]
    images, filters = (num_images, channels, _IMAGE_SIDE, _IMAGE_SIDE), (channels, channels, 3, 3)
    shapes = {"matmul": ((side, side), (side, side)), "convolution": (images, filters)}[operation]
    random = torch.Generator().manual_seed(1)
    left, right = (torch.randint(-8, 9, shape, generator=random).float() for shape in shapes)
    return left, right


def pattern(num_values: int, *, call: int, device: torch.device) -> Tensor:
    """The tensor of which all ranks send multiples in a call; each value differs from that of the call before."""
    return ((torch.arange(num_values, device=device) + _STEP * call) % _PERIOD + 1).float()


def fault(found: Tensor, expected: Tensor) -> str:
    """The number of wrong values in `found`, and the first one, in words; "" if there are none."""
    found = found.to(expected.device)
    places = (found != expected).flatten().nonzero().flatten()
    if not len(places):
        return ""
    value, right = (float(tensor.flatten()[places[0]]) for tensor in (found, expected))
    return f"{len(places)} of {found.numel()} values, the first is {value:.9g} in place of {right:.9g}"


class Device:
    """The arithmetic and communication of a rank. Tests pass one with a fault."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, operation: str, left: Tensor, right: Tensor) -> Tensor:
        return OPERATIONS[operation](left, right)

    def all_reduce(self, values: Tensor) -> None:
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
    rank: int
    device: str  # model of the rank's device
    seconds: dict[str, list[float]] = field(default_factory=dict)  # seconds of each operation, turn by turn
    wrong: dict[str, list[str]] = field(default_factory=dict)  # a text for each wrong result of each operation
    sweep: dict[int, list[float]] = field(default_factory=dict)  # seconds of all-reduce calls, by bytes
    faults: list[tuple[int, str]] = field(default_factory=list)  # wrong results of all-reduce: bytes, and a text


def measure(device: Device, *, rank: int, world_size: int, report: Callable[[str], object]) -> Measurement:
    """Measure as `rank`, together with the others; `report` is called with the name of each next phase."""
    own = device.device
    found = Measurement(rank=rank, device=torch.cuda.get_device_name(own) if own.type == "cuda" else "CPU")
    for operation in OPERATIONS:
        report(f"the {operation}")
        _calculate(found, device, operation, world_size=world_size)
    for num_bytes in SIZES if world_size > 1 else ():
        report(f"an all-reduce of {num_bytes:,} bytes")
        _all_reduce(found, device, num_bytes, world_size=world_size)
    return found


def _calculate(found: Measurement, device: Device, operation: str, *, world_size: int) -> None:
    """Time an operation while the other ranks are idle, and check each result. The first, untimed, warms up."""
    on_cpu = inputs(operation, device.device.type)
    # The host's processor calculates the right result in float64; float32 holds it.
    expected = OPERATIONS[operation](*(tensor.double() for tensor in on_cpu)).float()
    run = partial(device.run, operation, *(tensor.to(device.device) for tensor in on_cpu))
    faults = [fault(run(), expected)]
    seconds = found.seconds[operation] = []
    for turn in range(_NUM_TURNS * world_size):
        dist.barrier()
        if turn % world_size == found.rank:
            took_s, result = device.timed(run)
            seconds.append(took_s)
            faults.append(fault(result, expected))
    found.wrong[operation] = [each for each in faults if each]


def _all_reduce(found: Measurement, device: Device, num_bytes: int, *, world_size: int) -> None:
    """All-reduce a pattern, r + 1 times for rank r. It changes with every call, so that an old result is wrong."""
    seconds = found.sweep[num_bytes] = []
    for call in range(NUM_CALLS):
        sent = pattern(num_bytes // 4, call=call, device=device.device)
        values = sent * (found.rank + 1)
        seconds.append(device.timed(partial(device.all_reduce, values))[0])
        if problem := fault(values, sent * (world_size * (world_size + 1) // 2)):
            found.faults.append((num_bytes, problem))


def main(make_device: Callable[[torch.device, int], Device] = lambda device, rank: Device(device)) -> None:
    """Meet the other ranks, measure as the rank that the environment names, and write the results to a file."""
    accelerator, folder = sys.argv[1], Path(sys.argv[2])
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    phase = folder / f"rank{rank}.phase"
    phase.write_text("the meeting of the processes")
    device = torch.device("cuda", rank) if accelerator == "cuda" else torch.device("cpu")
    try:
        _join(device, rank=rank, world_size=world_size)
        found = measure(make_device(device, rank), rank=rank, world_size=world_size, report=phase.write_text)
        phase.write_text("the end")
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        destroy_process_group_at_exit()
    torch.save(asdict(found), folder / f"rank{rank}.pt")


def _join(device: torch.device, *, rank: int, world_size: int) -> None:
    """Join NCCL between GPUs, gloo between CPUs; as in `fit`, the ports are on the loopback interface."""
    environment = LocalEnvironment()
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=f"tcp://{environment.main_address}:{environment.main_port}",
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
        device_id=device if is_gpu else None,
    )


if __name__ == "__main__":
    main()
