"""`python -m lit_cifar bench forecast`: arguments, tables, record."""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from lit_cifar.bench.forecast import figure
from lit_cifar.bench.forecast.choice import DEVICES, predictions
from lit_cifar.bench.forecast.communication import Interconnect
from lit_cifar.bench.forecast.found import Given, Inputs, find_inputs
from lit_cifar.bench.forecast.inputs import Job
from lit_cifar.bench.forecast.prediction import Prediction
from lit_cifar.bench.forecast.tables import advice, check_table, cost_table, forecast_table, step_on_one_machine
from lit_cifar.bench.settings import Settings
from lit_cifar.commands.terminal import (
    CommandParser,
    about,
    console,
    exit_orderly_when_terminated,
    picture_file,
    say,
    writable,
)
from lit_cifar.errors import ConfigError
from lit_cifar.models import DEFAULT_ARCH, Arch, Stem, build_network, stem_of

_DESCRIPTION = """\
Step time, memory and efficiency of every mode on 1 to 1,024 devices, and the mode to choose. Of the speed of a device
and of the links, what is not given is measured here. If both are given, nothing is measured: in this way, ask about
machines that you do not have. docs/forecast.md has the formulas."""
_FIXED = ("fixed batch", "fixed batch of each device")


def main(args: list[str]) -> int:
    """Measure what is not given, and print; 130 after Ctrl-C.

    Raises:
        ConfigError: Arguments that cannot work.
    """
    options = forecast_parser().parse_args(args)
    json_file = None if options.json is None else writable(Path(options.json))
    picture = None if options.figure is None else picture_file(Path(options.figure), example="forecast.png")
    given = _given(options)
    exit_orderly_when_terminated()
    try:
        inputs = _inputs(given, options)
    except KeyboardInterrupt:
        print("interrupted; every process was ended", file=sys.stderr)
        return 130
    found = dict(zip(_FIXED, (_all(inputs.job, given.batch_size, grows) for grows in (False, True)), strict=True))
    sentences = advice(inputs.job, given.batch_size, threads_s=inputs.threads_s)
    _print(inputs, found, given.batch_size, sentences)
    if json_file is not None:
        record = about() | _record(inputs, found, given.batch_size) | {"advice": sentences}
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if picture is not None:
        panels = {_title(name, given.batch_size): each for name, each in found.items()}
        measured = {  # more processes than the machine has devices are on no line
            (mode, count): spread.median
            for (mode, count), spread in inputs.measured.items()
            if count <= inputs.job.machine.num_devices
        }
        figure.save(figure.draw(panels, title=_about(inputs), measured=measured), picture)
    return 0


def _all(job: Job, batch_size: int, grows: bool) -> list[Prediction]:
    """Of every mode on all numbers of devices; the batch grows with them, or stays."""
    return [each for count in DEVICES for each in predictions(job, count, batch_size * (count if grows else 1))]


def _inputs(given: Given, options: argparse.Namespace) -> Inputs:
    arch: Arch = "tiny" if options.small else options.arch
    stem = stem_of(arch, options.stem)
    network = build_network(arch, stem=stem, num_classes=10, image_size=32)
    flags = [f"--model.arch={arch}", *([] if stem is None else [f"--model.stem={stem}"])]
    with tempfile.TemporaryDirectory(prefix="lit_cifar-bench-") as folder:
        settings = Settings(
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            folder=Path(folder),
            rounds=options.rounds,
            small=options.small,
        )
        return find_inputs(network, flags, given, settings, lambda line: say(f"measuring {line}"))


def _print(inputs: Inputs, found: dict[str, list[Prediction]], batch_size: int, sentences: list[str]) -> None:
    job, out = inputs.job, console()
    for name, words in inputs.lines.items():
        out.print(f"{name:<18}{words}", markup=False)
    for name, each in found.items():
        out.print(forecast_table(each, title=f"{_title(name, batch_size)}: seconds of a step, efficiency"))
    count = job.machine.num_devices
    own = predictions(job, 1, batch_size) + (predictions(job, count, batch_size) if count > 1 else [])
    out.print(cost_table(own, title=f"one machine of {count}, batch {batch_size}: a step, and MiB of a device"))
    if inputs.measured:
        out.print(check_table(job, inputs.measured, batch_size))
    for sentence in sentences:
        out.print(sentence, markup=False)


def _about(inputs: Inputs) -> str:
    return "\n".join(f"{name}: {inputs.lines[name]}" for name in ("one device", "link"))


def _title(name: str, batch_size: int) -> str:
    return f"{name}, {batch_size} images"


def _record(inputs: Inputs, found: dict[str, list[Prediction]], batch_size: int) -> dict[str, Any]:
    machine = asdict(inputs.job.machine)
    if math.isinf(machine["memory_bytes"]):
        machine["memory_bytes"] = None
    return {
        "speed": asdict(inputs.job.speed),
        "machine": machine,
        "inputs": inputs.lines,
        "forecast": {name: [each.to_json() for each in rows] for name, rows in found.items()},
        "measured": [
            {
                "mode": mode,
                "processes": count,
                "step_s": list(spread.values),
                "forecast_s": step_on_one_machine(inputs.job, mode, count, batch_size),
            }
            for (mode, count), spread in inputs.measured.items()
        ],
        "one_process_all_threads_s": inputs.threads_s,
    }


def _given(options: argparse.Namespace) -> Given:
    given = Given(
        batch_size=options.batch_size,
        image_s=options.image_s,
        step_s=options.step_s,
        optimizer_s=options.optimizer_s,
        devices_per_machine=options.devices_per_machine,
        link=_link("link", options.link_gb_s, options.link_latency_us),
        between=_link("between", options.between_gb_s, options.between_latency_us),
        overlap=options.overlap,
        memory_bytes=options.memory_bytes,
    )
    given.check()
    return given


def _link(name: str, bytes_per_s: float | None, latency_s: float | None) -> Interconnect | None:
    if bytes_per_s is None and latency_s is None:
        return None
    if bytes_per_s is None or latency_s is None:
        has, lacks = ("gb-s", "latency-us") if latency_s is None else ("latency-us", "gb-s")
        raise ConfigError(f"--{name}-{has} without --{name}-{lacks}", remedy="pass both or neither")
    return Interconnect(bytes_per_s=bytes_per_s, latency_s=latency_s)


def _number(unit: float = 1.0, *, zero: bool = False, most: float = sys.float_info.max) -> Callable[[str], float]:
    """For argparse: a positive number, or 0 where that is allowed, times `unit`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value <= most or (zero and value == 0)):
            rule = "0 or more" if zero else "more than 0"
            upper = "" if most == sys.float_info.max else f", at most {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not a number of {rule}{upper}")
        return value * unit

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def forecast_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = CommandParser("bench forecast", description=_DESCRIPTION)
    add = parser.add_argument
    add("--model.arch", dest="arch", choices=get_args(Arch), default=DEFAULT_ARCH, help="As of fit.")
    add("--model.stem", dest="stem", choices=get_args(Stem), help="As of fit.")
    add("--batch_size", type=_count, default=32, metavar="N", help="Images of a step (default: 32).")
    add("--rounds", type=_count, default=3, metavar="N", help="How often each fit is timed (default: 3).")
    add("--small", action="store_true", help="A tiny network, for a look at the command itself.")
    add("--json", metavar="FILE", help="Write every value, versions and hardware to it.")
    add("--figure", metavar="FILE", help="Draw step time and efficiency over devices, as PNG, SVG or PDF.")
    _add_speed(parser.add_argument_group("speed of one device, measured unless --image-us is given").add_argument)
    _add_machine(parser.add_argument_group("machines").add_argument)
    return parser


def _add_speed(add: Callable[..., Any]) -> None:
    add("--image-us", dest="image_s", type=_number(1e-6), metavar="T", help="Forward and backward of one image.")
    text = "What a step takes beside its images (default: 0)."
    add("--step-ms", dest="step_s", type=_number(1e-3, zero=True), metavar="T", help=text)
    text = "The optimizer's step over all parameters (default: 0)."
    add("--optimizer-ms", dest="optimizer_s", type=_number(1e-3, zero=True), metavar="T", help=text)


def _add_machine(add: Callable[..., Any]) -> None:
    text = "Devices of a machine (default: the GPUs or cores of this one; 8 if --image-us is given)."
    add("--devices-per-machine", type=_count, metavar="N", help=text)
    add("--link-gb-s", type=_number(1e9), metavar="X", help="Between devices of a machine (default: measured).")
    add("--link-latency-us", type=_number(1e-6, zero=True), metavar="T", help="Of the same link.")
    add("--between-gb-s", type=_number(1e9), metavar="X", help="Between machines (default: 1.25, an assumption).")
    add("--between-latency-us", type=_number(1e-6, zero=True), metavar="T", help="Of the same (default: 50).")
    text = "Part of the messages that may pass while a device computes (default: 1 on GPUs, 0 on a CPU)."
    add("--overlap", type=_number(zero=True, most=1), metavar="F", help=text)
    text = "Memory of a device (default: what this one has; no limit if --image-us is given)."
    add("--memory-gib", dest="memory_bytes", type=_number(2**30), metavar="X", help=text)
