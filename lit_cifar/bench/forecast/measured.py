"""The speed of one device and of the links, measured here; and steps of `ddp` and `pp` to compare forecasts with."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from lit_cifar.bench.fits import Fit, seconds_per_step
from lit_cifar.bench.forecast.communication import Interconnect, link_from_sweep, two_terms
from lit_cifar.bench.forecast.inputs import Speed
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.timing import Spread, in_turn, measured_in_turn, wait_for
from lit_cifar.doctor.all_reduce import SIZES
from lit_cifar.doctor.ranks import probe_ranks
from lit_cifar.strategies.shared_memory import average_part
from lit_cifar.verify.runs import workers

CHECKED = (("ddp", 2), ("ddp", 4), ("pp", 2), ("pp", 4))
"""Modes and processes whose steps are measured beside their forecasts."""
_STEPS = 10  # of each fit
_LINK_ROUNDS = 3
_AVERAGED_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Seconds of steps that were measured in turn.

    Attributes:
        single: Of one device while all others train too, by the number of images.
        modes: Of a mode and a number of devices.
        threads: Of one process with as many threads as there are cores; None on a GPU.
    """

    single: Mapping[int, Spread]
    modes: Mapping[tuple[str, int], Spread]
    threads: Spread | None

    def speed(self, optimizer_s: float) -> Speed:
        """The line through the steps of one device, of which the optimizer's part does not grow with the images."""
        images = list(self.single)
        constant, image_s = two_terms([1.0] * len(images), images, [self.single[each].median for each in images])
        return Speed(step_s=max(0.0, constant - optimizer_s), image_s=image_s, optimizer_s=optimizer_s)


def measure_steps(
    flags: Sequence[str],
    settings: Settings,
    report: Report,
    *,
    batch_size: int,
    num_devices: int,
    checked: Sequence[tuple[str, int]],
) -> Steps:
    """Fits in turn: of one device with a quarter of `batch_size` images a step and with all, and of modes with all.

    Args:
        flags: Of `fit`: network and data.
        settings: Of the measurement.
        report: Told what is measured.
        batch_size: Of a step, over all devices. A multiple of 16: 4 microbatches on 4 processes.
        num_devices: GPUs of this machine, or its cores.
        checked: Modes, each with a number of processes.
    """
    on_cpu = settings.device.type == "cpu"
    kind = f"--trainer.accelerator={'cpu' if on_cpu else 'gpu'}"
    of = partial(_fit, [*flags, kind])
    parts = (batch_size // 4, batch_size)
    measurements: dict[str, Callable[[], float]] = {
        f"one device, {part}": partial(
            _all_at_once, of("single", 1, part), settings, count=num_devices if on_cpu else 1
        )
        for part in parts
    }
    measurements |= {
        f"{mode}, {count}": partial(seconds_per_step, of(mode, count, batch_size), settings, steps=_STEPS)
        for mode, count in checked
    }
    if on_cpu:
        threads = of("single", 1, batch_size, threads=num_devices)
        measurements["threads"] = partial(seconds_per_step, threads, settings, steps=_STEPS)
    report(f"steps of {', '.join(['one device', *(f'{mode} on {count}' for mode, count in checked)])}")
    found = measured_in_turn(measurements, rounds=settings.rounds)
    return Steps(
        single={part: found[f"one device, {part}"] for part in parts},
        modes={(mode, count): found[f"{mode}, {count}"] for mode, count in checked},
        threads=found.get("threads"),
    )


def _fit(flags: Sequence[str], mode: str, num_devices: int, batch_size: int, *, threads: int = 1) -> Fit:
    own = [*flags, f"--data.batch_size={batch_size}", f"--data.num_train={batch_size * _STEPS}"]
    strategy = [] if mode == "single" else [f"--trainer.strategy={mode}"]
    return Fit(flags=[*own, *strategy, f"--trainer.devices={num_devices}"], num_ranks=num_devices, threads=threads)


def _all_at_once(fit: Fit, settings: Settings, *, count: int) -> float:
    """The median over `count` equal fits that run at the same time, so that they share caches and memory."""
    with workers(count) as pool:
        runs = [pool.submit(seconds_per_step, fit, settings, steps=_STEPS) for _ in range(count)]
        return median(run.result() for run in runs)


def measure_optimizer(network: nn.Module, settings: Settings) -> float:
    """Seconds of a step of SGD with momentum over all parameters, with one thread."""
    own = network.to(settings.device)
    for parameter in own.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9).step
    with one_thread():
        found = in_turn({"step": step}, rounds=max(5, settings.rounds), wait=wait_for(settings.device))
    return found["step"].median


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's operators run in the thread that calls them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure_average(num_processes: int, settings: Settings) -> float:
    """Seconds in which a process averages a byte of gradients with others in shared memory, while so many do it."""

    def seconds() -> float:
        buffers = [torch.zeros(_AVERAGED_BYTES // 4) for _ in range(2)]
        call = partial(average_part, buffers, rank=0)
        return in_turn({"average": call}, rounds=max(5, settings.rounds))["average"].median

    with one_thread(), workers(num_processes) as pool:
        runs = [pool.submit(seconds) for _ in range(num_processes)]
        return median(run.result() for run in runs) / _AVERAGED_BYTES


def measure_link(num_devices: int, settings: Settings, report: Report) -> Interconnect:
    """From all-reduces between so many devices, two or more.

    Raises:
        RuntimeError: The processes could not send each other tensors.
    """
    report(f"all-reduces of {SIZES[0] // 1024} KiB to {SIZES[-1] // 2**20} MiB between {num_devices} processes")
    found = []
    for _ in range(1 if settings.small else _LINK_ROUNDS):
        ranks = probe_ranks(num_devices, "cuda" if settings.device.type == "cuda" else "cpu")
        if ranks.is_transport_faulty:
            raise RuntimeError(f"the processes cannot send each other tensors: {ranks.failure or ranks.messages}")
        found.append({size: ranks.all_reduce_s(size) for size in SIZES})
    return link_from_sweep({size: median(each[size] for each in found) for size in SIZES}, count=num_devices)
