"""Training steps: against the loop of the articles, and against the fastest convolution of this machine."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from os import cpu_count
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lit_cifar.bench import baseline
from lit_cifar.bench.fits import Fit, seconds_per_step
from lit_cifar.bench.rows import Goal, Row
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.timing import Spread, in_turn, measured_in_turn, ratio, wait_for
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.kernels import CANDIDATES, Kernels, fastest, time_candidates
from lit_cifar.launch.heap import keep_freed_memory
from lit_cifar.models import Arch, Stem, build_network

_STEPS = 8  # of each run that is timed
_BATCH = {"cifar": 32, "imagenet": 128}
_SHAPE = (3, 32, 32)
# Channels, and height of the images, of 3 x 3 convolutions as ResNet34 has them.
_CONVOLUTIONS = ((64, 32), (128, 16), (256, 8), (256, 16), (512, 8))


def measure(settings: Settings, report: Report) -> list[Row]:
    """Steps of ResNet34 with both stems; the share of the peak and the choice of kernels with the CIFAR stem."""
    stems: tuple[Stem, ...] = ("cifar", "imagenet")
    rows = [row for stem in stems for row in _against_the_loop(stem, settings, report)]
    return [*rows, *_share_of_peak(settings, report), *_choice(settings, report)]


def arch(settings: Settings) -> Arch:
    """The network of all sections."""
    return "tiny" if settings.small else "resnet34"


# Against the loop of the articles ------------------------------------------------------------------------------------


def _against_the_loop(stem: Stem, settings: Settings, report: Report) -> list[Row]:
    batch_size = 16 if settings.small else _BATCH[stem]
    flags = ["--data.dataset=synthetic", f"--data.num_train={batch_size * _STEPS}", "--data.val_size=0"]
    flags += [f"--data.batch_size={batch_size}", f"--model.arch={arch(settings)}", f"--model.stem={stem}"]
    flags += [f"--trainer.accelerator={'gpu' if settings.device.type == 'cuda' else 'cpu'}", "--trainer.devices=1"]
    threads = cpu_count() or 1
    fits = {
        "auto": Fit(flags=[*flags, "--kernels=auto"], threads=threads),
        "float32": Fit(flags=flags, threads=threads),
    }
    report(f"training steps with the {stem} stem")
    found = measured_in_turn(
        {"loop": _the_loop(stem, batch_size, settings)}
        | {name: partial(seconds_per_step, fit, settings, steps=_STEPS) for name, fit in fits.items()},
        rounds=settings.rounds,
    )
    goal = Goal(at_least=2.0 if stem == "cifar" else 1.5)
    name = f"fit against the articles' loop, {stem} stem, batch {batch_size}"
    of = partial(Row, section="step", unit="x")
    return [
        of(name=f"{name}, --kernels=auto", found=ratio(found["loop"], found["auto"]), goal=goal),
        of(name=f"{name}, float32", found=ratio(found["loop"], found["float32"])),
    ]


def _the_loop(stem: Stem, batch_size: int, settings: Settings) -> Callable[[], float]:
    """The median seconds of a step of the baseline, over as many steps as of the others are timed."""
    data = CIFAR10DataModule(dataset="synthetic", num_train=batch_size * _STEPS, val_size=0)
    data.setup("fit")
    images = baseline.loader(data.sets["train"], batch_size=batch_size, mean=data.source.mean, std=data.source.std)
    network = build_network(arch(settings), stem=stem, num_classes=10, image_size=32)
    step = baseline.training_step(network, baseline.forever(images), settings.device)

    def seconds() -> float:
        timed = []
        for number in range(_STEPS):
            start = perf_counter()
            step()
            if number > 2:
                timed.append(perf_counter() - start)
        return median(timed)

    return seconds


# Against the machine's peak ------------------------------------------------------------------------------------------


def _share_of_peak(settings: Settings, report: Report) -> list[Row]:
    """FLOP per second of a step over those of the fastest convolution, in the same precision."""
    keep_freed_memory()  # as `fit` does
    rows = []
    goals = {torch.float32: Goal(at_least=0.8), torch.bfloat16: Goal(at_least=0.7)}
    for dtype, goal in goals.items():
        words = "float32" if dtype == torch.float32 else "bf16"
        report(f"the fastest convolution and a step in {words}")
        steps = {
            each: _step(each, settings)
            for each in CANDIDATES
            if (each.precision == "32-true") == (dtype == torch.float32)
        }
        convolutions = _convolutions(dtype, settings)
        work = {f"step {each}": _flop(step) for each, step in steps.items()}
        work |= {name: _flop(call) for name, call in convolutions.items()}
        calls = {f"step {each}": step for each, step in steps.items()} | convolutions
        seconds = in_turn(calls, rounds=settings.rounds, wait=wait_for(settings.device))
        speeds = {name: Spread(tuple(work[name] / s for s in found.values)) for name, found in seconds.items()}
        peak = max((speeds[name] for name in convolutions), key=lambda speed: speed.median)
        best = max((speeds[f"step {each}"] for each in steps), key=lambda speed: speed.median)
        note = f"the fastest convolution reaches {peak.median / 1e9:,.0f} GFLOP/s"
        found = Spread(tuple(own / peak.median for own in best.values))
        name = f"a step's share of the fastest convolution, {words}, cifar stem"
        rows.append(Row(section="step", name=name, unit="%", found=found, goal=goal, note=note))
    return rows


def _step(kernels: Kernels, settings: Settings, batch_size: int = _BATCH["cifar"]) -> Callable[[], None]:
    """Forward, loss and backward with the CIFAR stem."""
    layout = torch.channels_last if kernels.channels_last else torch.contiguous_format
    network = build_network(arch(settings), stem="cifar", num_classes=10, image_size=32)
    network = network.to(device=settings.device, memory_format=layout).train()  # type: ignore[call-overload]
    images = torch.randn(batch_size, *_SHAPE, device=settings.device).contiguous(memory_format=layout)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=settings.device)

    def step() -> None:
        network.zero_grad()
        enabled = kernels.precision == "bf16-mixed"
        with torch.autocast(settings.device.type, torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(network(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def _convolutions(dtype: torch.dtype, settings: Settings) -> dict[str, Callable[[], None]]:
    """Forward of the convolutions of ResNet34, in both memory formats."""
    calls: dict[str, Callable[[], None]] = {}
    for channels, size in islice(_CONVOLUTIONS, 1 if settings.small else None):
        for layout in (torch.contiguous_format, torch.channels_last):
            layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            layer = layer.to(device=settings.device, dtype=dtype, memory_format=layout)  # type: ignore[call-overload]
            images = torch.randn(_BATCH["cifar"], channels, size, size, device=settings.device, dtype=dtype)
            images = images.contiguous(memory_format=layout)
            calls[f"{channels} channels, {size} pixels, {layout}"] = partial(_forward, layer, images)
    return calls


def _forward(layer: nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        layer(images)


def _flop(call: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


# The choice of kernels -----------------------------------------------------------------------------------------------


def _choice(settings: Settings, report: Report) -> list[Row]:
    """The kernels that `--kernels=auto` chooses, against the best of the four at the full batch size."""
    report("the choice of kernels")
    steps = {str(each): _step(each, settings) for each in CANDIDATES}
    network = build_network(arch(settings), stem="cifar", num_classes=10, image_size=32)
    chosen = str(fastest(time_candidates(network, _SHAPE, batch_size=_BATCH["cifar"], device=settings.device)))
    seconds = in_turn(steps, rounds=settings.rounds, wait=wait_for(settings.device))
    best = min(seconds, key=lambda name: seconds[name].median)
    return [
        Row(
            section="step",
            name="--kernels=auto against the best of the four, cifar stem",
            unit="x",
            found=ratio(seconds[chosen], seconds[best]),
            goal=Goal(at_most=1.03),
            note=f"it chose {chosen}; the best was {best}",
        )
    ]
