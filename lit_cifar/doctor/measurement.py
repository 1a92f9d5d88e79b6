"""What one rank measures: its arithmetic, its speed, and the all-reduces in which it takes part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter, time

import torch
import torch.distributed as dist
from torch import Tensor

from lit_cifar.doctor import all_reduce
from lit_cifar.doctor.arithmetic import RIGHT, Accelerator, Operation, difference, digest, operations

_NUM_TURNS = 7
_NUM_CALLS = 5


class Device:
    """What a rank computes with and communicates through. Tests pass one with a fault."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """The model of the GPU, or "CPU"."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @property
    def accelerator(self) -> Accelerator:
        """Its type."""
        return "cuda" if self.device.type == "cuda" else "cpu"

    def run(self, operation: Operation) -> Tensor:
        """The result of an operation whose inputs are on this device."""
        return operation.run()

    def all_reduce(self, values: Tensor) -> None:
        """Replace the values by their sum over all ranks."""
        dist.all_reduce(values)

    def wait(self) -> None:
        """Until everything has been computed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(kw_only=True)
class Measurement:
    """Of one rank.

    Attributes:
        rank: Whose.
        device: Name of its device.
        seconds: Of each operation, one number for each turn.
        wrong: Where results of an operation are wrong, one text for each turn in which they were.
        sweep: Seconds of all-reduce calls, each a list by the number of bytes in `all_reduce.SIZES`.
        faults: What was wrong with the result of an all-reduce: bytes, and a text for each such call.
        wall_s: Wall clock right after all ranks have met.
        drift_s: By how much the wall clock moved against the monotonic one meanwhile.
    """

    rank: int
    device: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    sweep: dict[int, list[float]] = field(default_factory=dict)
    faults: list[tuple[int, str]] = field(default_factory=list)
    wall_s: float = 0.0
    drift_s: float = 0.0


def measure(
    device: Device,
    *,
    rank: int,
    world_size: int,
    meet: Callable[[], None],
    report: Callable[[str], None],
    sizes: Sequence[int] = all_reduce.SIZES,
) -> Measurement:
    """Measure as `rank`, together with the other ranks.

    Args:
        device: Of this rank.
        rank: This one.
        world_size: Number of ranks that measure.
        meet: Returns when all ranks have called it.
        report: Called with what comes next.
        sizes: Of all-reduces, in bytes.
    """
    found = Measurement(rank=rank, device=device.name)
    meet()
    found.wall_s, offset = time(), time() - monotonic()
    for operation in operations(device.accelerator):
        report(f"the {operation.name}")
        _calculate(found, device, operation.to(device.device), world_size=world_size, meet=meet)
    for num_bytes in sizes if world_size > 1 else ():
        report(f"an all-reduce of {num_bytes:,} bytes")
        _all_reduce(found, device, num_bytes, world_size=world_size)
    found.drift_s = time() - monotonic() - offset
    return found


def _calculate(
    found: Measurement, device: Device, operation: Operation, *, world_size: int, meet: Callable[[], None]
) -> None:
    """Time an operation while the other ranks are idle, and check each result. The first, untimed, warms up."""
    seconds: list[float] = []
    wrong: list[str] = []
    _check(device.run(operation), operation, wrong)
    for _ in range(_NUM_TURNS):
        for turn in range(world_size):
            meet()
            if turn == found.rank:
                device.wait()
                begin = perf_counter()
                result = device.run(operation)
                device.wait()
                seconds.append(perf_counter() - begin)
                _check(result, operation, wrong)
    found.seconds[operation.name] = seconds
    found.wrong[operation.name] = wrong


def _check(result: Tensor, operation: Operation, wrong: list[str]) -> None:
    accelerator: Accelerator = "cuda" if operation.left.is_cuda else "cpu"
    if digest(result) != RIGHT[accelerator][operation.name]:
        wrong.append(difference(result, operation) or "the inputs, which the host's processor has made")


def _all_reduce(found: Measurement, device: Device, num_bytes: int, *, world_size: int) -> None:
    num_values = num_bytes // 4
    values = torch.zeros(num_values, device=device.device)
    seconds = []
    for call in range(_NUM_CALLS):
        sent = all_reduce.pattern(num_values, call=call, device=device.device)
        values.copy_(sent).mul_(all_reduce.weight(found.rank))
        device.wait()
        begin = perf_counter()
        device.all_reduce(values)
        device.wait()
        seconds.append(perf_counter() - begin)
        if problem := all_reduce.fault(values, call=call, rank=found.rank, world_size=world_size):
            found.faults.append((num_bytes, problem))
    found.sweep[num_bytes] = seconds
