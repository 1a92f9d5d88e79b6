"""What one of the doctor's processes measures: its arithmetic, its speed, and all-reduces with the others.

Run as `python -m lit_cifar.tools.doctor.measurement cpu|cuda FOLDER` with the environment variables that torchrun sets.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from time import perf_counter, time

import torch
import torch.distributed as dist
from torch import Tensor

from lit_cifar.launch.rendezvous import LocalEnvironment
from lit_cifar.launch.signals import destroy_process_group_at_exit
from lit_cifar.launch.startup import end_with_launcher
from lit_cifar.tools.doctor.arithmetic import Operation, operations, pattern, sum_fault

SIZES = tuple(1024 * 8**power for power in range(6))
"""Of all-reduces, in bytes: 1 KiB to 32 MiB."""
_TIMEOUT = timedelta(seconds=30)
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

    def run(self, operation: Operation) -> Tensor:
        """The result of an operation whose inputs are on this device."""
        return operation.run()

    def all_reduce(self, values: Tensor) -> None:
        """Replace the values by their sum over all ranks."""
        dist.all_reduce(values)

    def timed(self, call: Callable[[], Tensor]) -> tuple[float, Tensor]:
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
    wall_s: float = 0.0  # wall clock right after all ranks have met


def measure(
    device: Device,
    *,
    rank: int,
    world_size: int,
    meet: Callable[[], object],
    report: Callable[[str], object],
    sizes: Sequence[int] = SIZES,
) -> Measurement:
    """Measure as `rank`, together with the others: `meet` returns when all have called it.

    `report` is called with what comes next. `sizes` of all-reduces are in bytes.
    """
    found = Measurement(rank=rank, device=device.name)
    meet()
    found.wall_s = time()
    for operation in operations(device.device.type):
        report(f"the {operation.name}")
        _calculate(found, device, operation.to(device.device), world_size=world_size, meet=meet)
    for num_bytes in sizes if world_size > 1 else ():
        report(f"an all-reduce of {num_bytes:,} bytes")
        _all_reduce(found, device, num_bytes, world_size=world_size)
    return found


def _calculate(
    found: Measurement, device: Device, operation: Operation, *, world_size: int, meet: Callable[[], object]
) -> None:
    """Time an operation while the other ranks are idle, and check each result. The first, untimed, warms up."""
    faults = [operation.fault(device.run(operation))]
    seconds = found.seconds[operation.name] = []
    for turn in range(_NUM_TURNS * world_size):
        meet()
        if turn % world_size == found.rank:
            took_s, result = device.timed(lambda: device.run(operation))
            seconds.append(took_s)
            faults.append(operation.fault(result))
    found.wrong[operation.name] = [fault for fault in faults if fault]


def _all_reduce(found: Measurement, device: Device, num_bytes: int, *, world_size: int) -> None:
    values = torch.zeros(num_bytes // 4, device=device.device)

    def reduce() -> Tensor:
        device.all_reduce(values)
        return values

    seconds = found.sweep[num_bytes] = []
    for call in range(_NUM_CALLS):
        values.copy_(pattern(len(values), call=call, device=device.device)).mul_(found.rank + 1)
        seconds.append(device.timed(reduce)[0])
        if problem := sum_fault(values, call=call, rank=found.rank, world_size=world_size):
            found.faults.append((num_bytes, problem))


def main(make_device: Callable[[torch.device, int], Device] = lambda device, rank: Device(device)) -> None:
    """Meet the other ranks, measure as the one that the environment names, and write what was found to a file."""
    end_with_launcher()
    device_type, folder = sys.argv[1], Path(sys.argv[2])
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    phase = folder / f"rank{rank}.phase"
    phase.write_text("the meeting of the processes")
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    try:
        _join(device, rank=rank, world_size=world_size)
        own = make_device(device, rank)
        found = measure(own, rank=rank, world_size=world_size, meet=dist.barrier, report=phase.write_text)
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
