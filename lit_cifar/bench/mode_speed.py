"""What modes win and cost on the CPU: processes against threads, a pipeline against one process."""

from collections.abc import Callable
from functools import partial

from lit_cifar.bench.fits import Fit
from lit_cifar.bench.rows import Goal, Row
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.step import arch
from lit_cifar.bench.timing import Spread, measured_in_turn, ratio
from lit_cifar.bench.turns import training_in_turn
from lit_cifar.models import Stem, build_network
from lit_cifar.models.partition import Partition

_BATCH = 128
_BATCH_OF_MP = 32
_MICROBATCHES = (8, 16)
# Steps of a turn: so many that are timed, after so many that warm the caches up. Those of the CIFAR stem take seconds.
_STEPS: dict[Stem, dict[str, int]] = {"cifar": {"steps": 1, "skip": 0}, "imagenet": {"steps": 3, "skip": 1}}
_of = partial(Row, section="modes", unit="x")


def measure(settings: Settings, report: Report) -> list[Row]:
    """Steps of ResNet34 on two cores, in float32: `ddp` and `fsdp2` on two processes, then `pp` and `mp`."""
    rows = []
    for stem in ("cifar", "imagenet"):
        report(f"ddp with the {stem} stem")
        rows += _ddp(stem, settings)
    report("pp with the cifar stem")
    rows += _pp(settings)
    report("mp with the cifar stem")
    return [*rows, _mp(settings)]


def _ddp(stem: Stem, settings: Settings) -> list[Row]:
    make = partial(_fit, stem, _batch_size(settings), settings)
    fits = {"threads": make(threads=2), "ddp": make("ddp")}
    if stem == "imagenet":
        fits["fsdp2"] = make("fsdp2")
    found = _timed(fits, stem, settings)
    name = f"{stem} stem, batch {_batch_size(settings)}"
    rows = [
        _of(
            name=f"speed of ddp, 2 processes x 1 thread, against 1 x 2 threads, {name}",
            found=ratio(found["threads"], found["ddp"]),
            goal=Goal(at_least=0.97 if stem == "cifar" else 0.92),
        )
    ]
    if "fsdp2" in found:
        own = ratio(found["fsdp2"], found["ddp"])
        note = "it copies the weights and waits for the other process 54 times, and its own Python code takes 80 ms"
        rows.append(_of(name=f"step of fsdp2 against ddp, {name}", found=own, goal=Goal(at_most=1.1), note=note))
    return rows


def _pp(settings: Settings) -> list[Row]:
    batch_size = _batch_size(settings)
    make = partial(_fit, "cifar", batch_size, settings)
    fits = {"one": make()} | {f"1F1B {number}": _pipeline(make, number, "1F1B") for number in _MICROBATCHES}
    fits["GPipe 8"] = _pipeline(make, 8, "GPipe")
    found = _timed(fits, "cifar", settings)
    name, share = f"cifar stem, batch {batch_size}", _largest_share(settings)
    goals = dict(zip(_MICROBATCHES, (Goal(at_least=1.6), Goal(at_least=1.7)), strict=True))
    rows = [
        _of(
            name=f"speed of pp, 2 stages x 1 thread, {number} microbatches, against 1 process x 1 thread, {name}",
            found=ratio(found["one"], found[f"1F1B {number}"]),
            goal=goal,
            note=f"at most {number / (number + 1) / share:.3f}x by the schedule's bubble and the cut, and less where "
            f"microbatches of {batch_size // number} images take longer for an image than the whole batch",
        )
        for number, goal in goals.items()
    ]
    even = ratio(found["1F1B 8"], found["GPipe 8"])
    return [*rows, _of(name=f"step of 1F1B against GPipe, 8 microbatches, {name}", found=even, goal=Goal(at_most=1.05))]


def _mp(settings: Settings) -> Row:
    make = partial(_fit, "cifar", _BATCH_OF_MP, settings)
    found = _timed({"one": make(), "mp": make("mp")}, "cifar", settings)
    return _of(
        name=f"step of mp without microbatches against one device, cifar stem, batch {_BATCH_OF_MP}",
        found=ratio(found["mp"], found["one"]),
        goal=Goal(at_most=1.02),
    )


def _largest_share(settings: Settings) -> float:
    """Of the FLOP, that of the larger of two stages."""
    network = build_network(arch(settings), stem="cifar", num_classes=10, image_size=32)
    flop = [stage.flop for stage in Partition.of(network, (3, 32, 32), num_stages=2).stages]
    return max(flop) / sum(flop)


def _timed(fits: dict[str, Fit], stem: Stem, settings: Settings) -> dict[str, Spread]:
    with training_in_turn(fits, folder=settings.folder) as seconds:
        for name in fits:  # memory is allocated, kernels are chosen, DDP cuts its buckets
            seconds(name, steps=1, skip=_STEPS[stem]["skip"])
        of_turn = {name: partial(seconds, name, **_STEPS[stem]) for name in fits}
        return measured_in_turn(of_turn, rounds=settings.rounds)


def _pipeline(make: Callable[..., Fit], num_microbatches: int, schedule: str) -> Fit:
    flags = {"num_microbatches": num_microbatches, "schedule": schedule}
    return make("PipelineStrategy", *(f"--trainer.strategy.{name}={value}" for name, value in flags.items()))


def _fit(
    stem: Stem, batch_size: int, settings: Settings, strategy: str | None = None, *more: str, threads: int = 1
) -> Fit:
    """A fit on two devices with a strategy, else on one; long enough for all turns."""
    num_steps = 4 + settings.rounds * sum(_STEPS[stem].values())
    flags = ["--data.dataset=synthetic", f"--data.num_train={batch_size * num_steps}", "--data.val_size=0"]
    flags += [f"--data.batch_size={batch_size}", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    flags += [f"--model.arch={arch(settings)}", f"--model.stem={stem}"]
    mode = ["--trainer.devices=1"] if strategy is None else [f"--trainer.strategy={strategy}", "--trainer.devices=2"]
    num_ranks = 1 if strategy in (None, "mp") else 2
    return Fit(flags=[*flags, *mode, *more], num_ranks=num_ranks, threads=threads)


def _batch_size(settings: Settings) -> int:
    return 32 if settings.small else _BATCH
