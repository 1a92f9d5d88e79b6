"""What modes win and cost on the CPU: processes against threads, a pipeline against one process."""

from functools import partial

from lit_cifar.bench.fits import Fit
from lit_cifar.bench.rows import Goal, Row
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.step import arch
from lit_cifar.bench.timing import Spread, measured_in_turn, ratio
from lit_cifar.bench.turns import training_in_turn
from lit_cifar.models import Stem, build_network
from lit_cifar.models.partition import Partition

_BATCH: dict[Stem, int] = {"cifar": 64, "imagenet": 128}
_STEPS: dict[Stem, int] = {"cifar": 1, "imagenet": 3}  # timed in a turn, after one that warms the caches up
_MICROBATCHES = (8, 16)


def measure(settings: Settings, report: Report) -> list[Row]:
    """Steps of ResNet34 on two cores, in float32: `ddp` and `fsdp2` on two processes, then `pp` and `mp`."""
    return [
        *_ddp("cifar", settings, report),
        *_ddp("imagenet", settings, report),
        *_layers(settings, report),
    ]


def _ddp(stem: Stem, settings: Settings, report: Report) -> list[Row]:
    report(f"ddp with the {stem} stem")
    with_parts = stem == "imagenet"
    fits = {"threads": _fit(stem, settings, threads=2), "ddp": _fit(stem, settings, "ddp", ranks=2)}
    if with_parts:
        fits["fsdp2"] = _fit(stem, settings, "fsdp2", ranks=2)
    found = _timed(fits, stem, settings)
    name = f"{stem} stem, batch {_batch_size(stem, settings)}"
    of = partial(Row, section="modes", unit="x")
    goal = Goal(at_least=0.97 if stem == "cifar" else 0.92)
    rows = [
        of(
            name=f"speed of ddp, 2 processes x 1 thread, against 1 x 2 threads, {name}",
            found=ratio(found["threads"], found["ddp"]),
            goal=goal,
        )
    ]
    if with_parts:
        own = ratio(found["fsdp2"], found["ddp"])
        rows.append(of(name=f"step of fsdp2 against ddp, 2 processes, {name}", found=own, goal=Goal(at_most=1.1)))
    return rows


def _layers(settings: Settings, report: Report) -> list[Row]:
    report("pp and mp with the cifar stem")
    fits = {"one": _fit("cifar", settings, threads=1), "mp": _fit("cifar", settings, "mp")}
    for number in _MICROBATCHES:
        fits[f"pp{number}"] = _pipeline(number, settings)
    fits["gpipe"] = _pipeline(_MICROBATCHES[0], settings, schedule="GPipe")
    found = _timed(fits, "cifar", settings)
    name = f"cifar stem, batch {_batch_size('cifar', settings)}"
    of = partial(Row, section="modes", unit="x")
    share = _largest_share(settings)
    goals = dict(zip(_MICROBATCHES, (Goal(at_least=1.6), Goal(at_least=1.7)), strict=True))
    rows = [
        of(
            name=f"speed of pp, 2 stages x 1 thread, {number} microbatches, against 1 process x 1 thread, {name}",
            found=ratio(found["one"], found[f"pp{number}"]),
            goal=goal,
            note=f"at most {number / (number + 1) / share:.3f}x by the schedule's bubble and the cut",
        )
        for number, goal in goals.items()
    ]
    even = ratio(found["pp8"], found["gpipe"])
    whole = ratio(found["mp"], found["one"])
    return [
        *rows,
        of(name=f"step of 1F1B against GPipe, 2 stages, 8 microbatches, {name}", found=even, goal=Goal(at_most=1.05)),
        of(name=f"step of mp without microbatches against one device, {name}", found=whole, goal=Goal(at_most=1.02)),
    ]


def _largest_share(settings: Settings) -> float:
    """Of the FLOP, that of the larger of two stages."""
    network = build_network(arch(settings), stem="cifar", num_classes=10, image_size=32)
    flop = [stage.flop for stage in Partition.of(network, (3, 32, 32), num_stages=2).stages]
    return max(flop) / sum(flop)


def _timed(fits: dict[str, Fit], stem: Stem, settings: Settings) -> dict[str, Spread]:
    with training_in_turn(fits, folder=settings.folder) as seconds:
        for name in fits:
            seconds(name, steps=1)
        of_turn = {name: partial(seconds, name, steps=_STEPS[stem]) for name in fits}
        return measured_in_turn(of_turn, rounds=settings.rounds)


def _pipeline(num_microbatches: int, settings: Settings, *, schedule: str = "1F1B") -> Fit:
    flags = [f"--trainer.strategy.num_microbatches={num_microbatches}", f"--trainer.strategy.schedule={schedule}"]
    return _fit("cifar", settings, "PipelineStrategy", *flags, ranks=2)


def _fit(
    stem: Stem, settings: Settings, strategy: str | None = None, *more: str, ranks: int = 1, threads: int = 1
) -> Fit:
    """A fit of two devices with a strategy, else of one; long enough for all turns."""
    batch_size = _batch_size(stem, settings)
    num_steps = 4 + settings.rounds * (_STEPS[stem] + 1)
    flags = ["--data.dataset=synthetic", f"--data.num_train={batch_size * num_steps}", "--data.val_size=0"]
    flags += [f"--data.batch_size={batch_size}", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    flags += [f"--model.arch={arch(settings)}", f"--model.stem={stem}"]
    mode = ["--trainer.devices=1"] if strategy is None else [f"--trainer.strategy={strategy}", "--trainer.devices=2"]
    return Fit(flags=[*flags, *mode, *more], num_ranks=ranks, threads=threads)


def _batch_size(stem: Stem, settings: Settings) -> int:
    return 32 if settings.small else _BATCH[stem]
