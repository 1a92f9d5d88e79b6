"""The inputs of a forecast: given by the user, measured here, or assumed; and a line that says which."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import psutil  # type: ignore[import-untyped]
import torch
from torch import nn

from lit_cifar.bench.forecast.communication import Interconnect
from lit_cifar.bench.forecast.counted import count
from lit_cifar.bench.forecast.inputs import Job, Machine, Speed
from lit_cifar.bench.forecast.measured import (
    CHECKED,
    measure_average,
    measure_link,
    measure_optimizer,
    measure_steps,
)
from lit_cifar.bench.forecast.tables import seconds
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.timing import Spread
from lit_cifar.doctor.mode_table import LocalMachine
from lit_cifar.errors import ConfigError

IMAGE_SHAPE = (3, 32, 32)
_ASSUMED_DEVICES = 8
_ASSUMED_BETWEEN = Interconnect(latency_s=50e-6, bytes_per_s=1.25e9)  # Ethernet of 10 Gbit/s
_MOST_RANKS = 8  # of the processes of a CPU that measure a link
_LOAD_S = 1.0  # for which the cores are watched
_MULTIPLE = 16  # 4 microbatches on 4 processes


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user has given; None is measured, or assumed where it cannot be.

    Attributes:
        batch_size: Images of a step.
        image_s: As of `Speed`, as are the next two.
        devices_per_machine: As of `Machine`, as are `overlap` and `memory_bytes`.
        link: Latency in seconds and bytes per second inside a machine.
        between: Likewise between machines.
    """

    batch_size: int
    image_s: float | None = None
    step_s: float | None = None
    optimizer_s: float | None = None
    devices_per_machine: int | None = None
    link: Interconnect | None = None
    between: Interconnect | None = None
    overlap: float | None = None
    memory_bytes: float | None = None

    @property
    def measures_speed(self) -> bool:
        return self.image_s is None

    def check(self) -> None:
        """Raise a `ConfigError` for values that contradict each other or this machine."""
        if self.measures_speed and (self.step_s is not None or self.optimizer_s is not None):
            raise ConfigError(
                "--step-ms and --optimizer-ms are parts of a given speed",
                remedy="pass --image-us too, or leave them out to measure all three",
            )
        if self.measures_speed and self.batch_size % _MULTIPLE:
            near = max(_MULTIPLE, round(self.batch_size / _MULTIPLE) * _MULTIPLE)
            raise ConfigError(
                f"--batch_size={self.batch_size}, but steps of 4 microbatches on 4 processes are measured",
                remedy=f"pass a multiple of {_MULTIPLE}, e.g. --batch_size={near}",
            )
        if self.link is None and num_devices_here() < 2:
            raise ConfigError(
                "this machine has one device, and so no link to measure",
                remedy="pass the link between devices, e.g. --link-gb-s 25 --link-latency-us 10",
            )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A job, and where its numbers come from.

    Attributes:
        job: What is forecast.
        lines: Each input in words.
        measured: Steps to compare forecasts with, by mode and number of processes.
        threads_s: Seconds of a step of one process with as many threads as the CPU has cores.
    """

    job: Job
    lines: dict[str, str]
    measured: dict[tuple[str, int], Spread] = field(default_factory=dict)
    threads_s: float | None = None


def find_inputs(network: nn.Module, flags: Sequence[str], given: Given, settings: Settings, report: Report) -> Inputs:
    """Measure what is not given.

    Args:
        network: Of which steps are forecast.
        flags: Of `fit`, for the same network.
        given: What need not be measured.
        settings: Of the measurements.
        report: Told what is measured.
    """
    here, load = num_devices_here(), _busy_cores()
    link = given.link or measure_link(min(here, _MOST_RANKS), settings, report)
    if not given.measures_speed:
        machine = _machine(given, link, num_devices=_ASSUMED_DEVICES, num_cores=None, memory_bytes=inf)
        speed = Speed(step_s=given.step_s or 0.0, image_s=given.image_s or 0.0, optimizer_s=given.optimizer_s or 0.0)
        job = Job(network=count(network, IMAGE_SHAPE), speed=speed, machine=machine)
        return Inputs(job=job, lines=_lines(job, given))
    data = ["--data.dataset=synthetic", "--data.val_size=0"]
    possible = [each for each in CHECKED if settings.device.type == "cpu" or each[1] <= here]
    checked = possible if given.link is None else []  # the links here say nothing of another
    steps = measure_steps(
        [*flags, *data], settings, report, batch_size=given.batch_size, num_devices=here, checked=checked
    )
    job = Job(
        network=count(network, IMAGE_SHAPE),
        speed=steps.speed(measure_optimizer(network, settings)),
        machine=_machine_here(given, link, settings, load=load),
    )
    return Inputs(
        job=job,
        lines=_lines(job, given) | {"other programs": f"{load:.1f} cores busy before the measurement (best: 0)"},
        measured=dict(steps.modes),
        threads_s=None if steps.threads is None else steps.threads.median,
    )


def num_devices_here() -> int:
    """GPUs, or without any the cores that this process may use."""
    here = LocalMachine.here()
    return here.num_gpus or here.num_cores


def _busy_cores() -> float:
    """How many cores other programs keep busy, over a second. The system's load average counts what has just ended."""
    return float(psutil.cpu_percent(interval=_LOAD_S) / 100 * psutil.cpu_count())


def _machine_here(given: Given, link: Interconnect, settings: Settings, *, load: float) -> Machine:
    here = num_devices_here()
    if settings.device.type == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        return _machine(given, link, num_devices=here, num_cores=None, memory_bytes=memory)
    memory = psutil.virtual_memory().total / (given.devices_per_machine or here)
    machine = _machine(given, link, num_devices=here, num_cores=here, memory_bytes=memory)
    average_s = measure_average(here, settings) if given.link is None else None
    return replace(machine, load=load, average_s=average_s)


def _machine(
    given: Given, link: Interconnect, *, num_devices: int, num_cores: int | None, memory_bytes: float
) -> Machine:
    overlap = given.overlap
    if overlap is None:
        overlap = 1.0 if num_cores is None else 0.0  # the cores that compute also move the messages
    return Machine(
        num_devices=given.devices_per_machine or num_devices,
        inside=link,
        between=given.between or _ASSUMED_BETWEEN,
        num_cores=num_cores,
        overlap=overlap,
        memory_bytes=given.memory_bytes or memory_bytes,
    )


def _lines(job: Job, given: Given) -> dict[str, str]:
    speed, machine = job.speed, job.machine
    each = f"{seconds(speed.image_s)} an image, {seconds(speed.step_s)} a step, {seconds(speed.optimizer_s)} optimizer"
    how = "measured while every core trains" if machine.num_cores else "measured"
    has = f"{machine.num_devices} devices" + (f" on {machine.num_cores} cores" if machine.num_cores else "")
    memory = "" if machine.memory_bytes == inf else f", {machine.memory_bytes / 2**30:.3g} GiB each"
    origin = "assumed" if given.devices_per_machine is None and not given.measures_speed else "given or found"
    lines = {
        "one device": f"{each} ({how if given.measures_speed else 'given'})",
        "link": f"{_in_words(machine.inside)} ({'measured' if given.link is None else 'given'})",
        "between machines": f"{_in_words(machine.between)} ({'assumed' if given.between is None else 'given'})",
        "a machine": f"{has}{memory} ({origin})",
        "overlap": f"{machine.overlap:.0%} of the messages may pass while a device computes",
    }
    if machine.average_s is not None:
        lines["gradients"] = f"averaged in shared memory, {1e-9 / machine.average_s:.3g} GB/s (measured)"
    return lines


def _in_words(link: Interconnect) -> str:
    return f"{link.bytes_per_s / 1e9:.3g} GB/s, latency {seconds(link.latency_s)}"
