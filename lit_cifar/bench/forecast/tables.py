"""The tables of `bench forecast`, and the sentences about the mode to choose."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich import box
from rich.table import Table

from lit_cifar.bench.forecast.choice import fastest, predictions
from lit_cifar.bench.forecast.inputs import Job
from lit_cifar.bench.forecast.prediction import Prediction
from lit_cifar.bench.rows import shown
from lit_cifar.bench.timing import Spread
from lit_cifar.modes import MODES

GOAL = 0.15
"""How far a forecast may be from the measured step."""
_DEVICES = (1, 2, 4, 8, 64, 1024)
_MIB, _GIB = 2**20, 2**30


def forecast_table(found: Sequence[Prediction], *, title: str) -> Table:
    """A row for each mode, a column for each number of devices: seconds of a step, and the efficiency below."""
    table = _table(title)
    table.add_column("mode")
    for count in _DEVICES:
        table.add_column(f"{count:,}", justify="right", no_wrap=True)
    by_place = {(each.mode, each.num_devices): each for each in found}
    single = by_place["single", 1]
    for mode in MODES:
        cells = [_cell(by_place.get((mode.name, count)), single) for count in _DEVICES]
        table.add_row(mode.name, *cells)
    return table


def _cell(prediction: Prediction | None, single: Prediction) -> str:
    if prediction is None:
        return "-"
    return f"{seconds(prediction.step_s)}\n[dim]{prediction.efficiency(single):.0%}[/]"


def cost_table(found: Sequence[Prediction], *, title: str) -> Table:
    """Of each mode on some devices: where the step's time goes, and the memory of one device."""
    table = _table(title)
    table.add_column("mode")
    for name in ("step", "compute", "idle", "messages", "not hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("param.", "grad.", "state", "activ.", "buckets", "all"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        times = (each.step_s, each.compute_s, each.idle_s, each.communication_s, each.exposed_s)
        held = each.memory
        parts = (held.parameters, held.gradients, held.optimizer, held.activations, held.buckets, held.total)
        table.add_row(each.mode, *map(seconds, times), *(f"{part / _MIB:,.0f}" for part in parts))
    return table


def step_on_one_machine(job: Job, mode: str, num_processes: int, batch_size: int) -> float:
    """Seconds of a step of so many processes on one machine, also where they are more than its devices."""
    machine = replace(job.machine, num_devices=max(num_processes, job.machine.num_devices))
    found = predictions(replace(job, machine=machine), num_processes, batch_size)
    return next(each.step_s for each in found if each.mode == mode)


def check_table(job: Job, measured: Mapping[tuple[str, int], Spread], batch_size: int) -> Table:
    """Forecasts beside measured steps of processes on this one machine."""
    table = _table(f"forecast beside measurement, all on this machine, batch {batch_size}; goal: within {GOAL:.0%}")
    table.add_column("mode")
    for name in ("processes", "forecast", "measured", "middle half", "n", "forecast / measured", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for (mode, count), spread in measured.items():
        step_s = step_on_one_machine(job, mode, count, batch_size)
        ratio = step_s / spread.median
        table.add_row(
            mode,
            str(count),
            seconds(step_s),
            seconds(spread.median),
            f"{seconds(spread.low)} to {seconds(spread.high)}",
            str(spread.n),
            f"{ratio:.2f}",
            "[bold green]met[/]" if abs(ratio - 1) <= GOAL else "[bold red]not met[/]",
        )
    return table


def advice(job: Job, batch_size: int, *, threads_s: float | None = None) -> list[str]:
    """The mode to choose on one machine and why, in sentences.

    `threads_s` is the measured step of one process with as many threads as a CPU has cores.
    """
    machine, count = job.machine, job.machine.num_devices
    candidates = predictions(job, 1, batch_size) + (predictions(job, count, batch_size) if count > 1 else [])
    best = fastest(candidates, machine.memory_bytes)
    if best is None:
        least = min(candidates, key=lambda each: each.memory.total)
        return [
            f"No mode fits into {machine.memory_bytes / _GIB:.3g} GiB: {least.mode} needs the least, "
            f"{least.memory.total / _GIB:.3g} GiB. Take a smaller batch or more devices."
        ]
    lines = [
        f"The mode to choose: {best.mode} on {_devices(best.num_devices)}: {seconds(best.step_s)} a step of "
        f"{batch_size} images, {best.efficiency(candidates[0]):.0%} of the speed of one device on each."
    ]
    lines += _why(best, candidates, machine.memory_bytes)
    if threads_s is not None and threads_s < best.step_s:
        lines.append(
            f"But one process with {_count(count, 'thread')} was measured at {seconds(threads_s)} a step: for speed "
            "alone, on this machine, train in one process."
        )
    return lines


def _why(best: Prediction, candidates: Sequence[Prediction], memory_bytes: float) -> list[str]:
    preferred = fastest(candidates, math.inf)
    slower = [each for each in candidates if each.step_s > best.step_s and each.memory.total <= memory_bytes]
    lines = []
    if preferred is not None and preferred is not best:
        lines.append(
            f"{preferred.mode} would take {seconds(preferred.step_s)}, and needs "
            f"{preferred.memory.total / _GIB:.3g} GiB of a device that has {memory_bytes / _GIB:.3g}."
        )
    if slower:
        after = min(slower, key=lambda each: each.step_s)
        lines.append(f"Next comes {after.mode} with {seconds(after.step_s)}, of which {_largest_loss(after)}.")
    lines.append(f"Of the step of {best.mode}, {_largest_loss(best)}.")
    return lines


def _largest_loss(each: Prediction) -> str:
    waiting = f"{each.exposed_s / each.step_s:.0%} is waiting for messages"
    return f"{waiting} and {each.idle_s / each.step_s:.0%} for other stages" if each.idle_s else waiting


def seconds(value: float) -> str:
    """In ms, or in s from one second on; a dash for nothing."""
    if not value:
        return "0"
    return shown(value, "s") if value >= 1 else shown(1e3 * value, "ms") if value >= 1e-3 else shown(1e6 * value, "us")


def _devices(count: int) -> str:
    return _count(count, "device")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
