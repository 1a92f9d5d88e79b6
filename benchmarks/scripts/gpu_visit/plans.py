"""The steps of a visit, most valuable first. Step 9 is in `speed`."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_visit import speed
from gpu_visit.compare import compare, last_checkpoint, logged
from gpu_visit.one_device import ONE_PROCESS, TWO_RANKS, chosen, equivalent
from gpu_visit.step import Check, FailedError, Step

_TESTS = Path(__file__).parents[3] / "tests" / "test_gpu.py"
_PYTEST = ("pytest", str(_TESTS), "-q", "-rfEs", "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=short")
_ON_CPU = "--trainer.accelerator=cpu"
_FLOAT64 = "--trainer.precision=64-true"
_TINY = (
    "--model.stem=imagenet",
    "--data.dataset=synthetic",
    "--data.num_train=96",
    "--data.num_test=100",
    "--data.val_size=16",
    "--data.batch_size=16",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.log_every_n_steps=1",
    "--figures.every_n_epochs=0",
)
# Three steps; the third batch is half as long as the others.
_THREE_STEPS = {
    "cuda": ("--model.arch=resnet34", "--data.num_train=261", "--data.val_size=101", "--data.batch_size=64"),
    "cpu": ("--data.num_train=61", "--data.val_size=21"),
}
_TWO_EPOCHS = (*_TINY, "--trainer.max_epochs=2", _FLOAT64, "--model.optimizer.lr=1e-3")
_STOP = ("--trainer.callbacks+=gpu_visit.callbacks.Terminate", "--trainer.callbacks.step=3")
_STOPPED = 143


def first(step: Step) -> None:
    """Step 1: does it import, what is there, and does a short training run?"""

    def modes() -> str:
        output = step.output_of("modes", "lit_cifar", "modes")
        device = "GPU" if step.visit.on_gpu else "CPU"
        if lines := [" ".join(line.split()) for line in output.splitlines() if f" {device}" in line]:
            return lines[0]
        raise FailedError(f"no line of the table says {device}")

    def fit() -> tuple[str, dict[str, Any]]:
        folder = step.fit("fit", *_TINY)
        if not last_checkpoint(folder).exists() or len(_losses(folder)) < 5:
            raise FailedError(f"{len(_losses(folder))} losses, checkpoint: {last_checkpoint(folder).exists()}")
        return "5 steps and a checkpoint", json.loads((folder / "environment.json").read_text())

    step.check("modes", modes)
    step.check("fit", fit)


def waits(step: Step) -> None:
    """Step 2: does the host ever wait for the device between two log points? Every mode, and a planted wait."""

    def check(name: str, flags: list[str], expected: int) -> str:
        path = step.work / f"{name}.json"
        watch = ["--trainer.callbacks+=gpu_visit.callbacks.HostWaits", f"--trainer.callbacks.path={path}"]
        # Fifteen steps in an epoch, none of which is a log point.
        size = ["--data.num_train=256", "--trainer.log_every_n_steps=1000", "--trainer.limit_val_batches=0"]
        step.fit(name, *_TINY, *size, *watch, *flags)
        places: dict[str, int] = json.loads(path.read_text())
        if sum(places.values()) != expected:
            shown = "; ".join(f"{count} x {place}" for place, count in places.items())
            raise FailedError(f"{sum(places.values())} waits, not {expected}: {shown}")
        return "found" if expected else "no wait in 9 steps"

    runs = {name: (flags, 0) for name, flags in chosen(ONE_PROCESS, on_gpu=step.visit.on_gpu).items()}
    if step.visit.on_gpu:
        runs["a planted wait"] = (["--trainer.callbacks.plant=true"], 1)
        runs["single, bf16"] = (["--trainer.precision=bf16-mixed"], 0)
        runs["single, images on the host"] = (["--data.resident=host"], 0)
    step.check_all({name: partial(check, name, *how) for name, how in runs.items()})


def tests(step: Step, marker: str) -> None:
    """Steps 3 and 10: the tests of the package that are for a GPU."""

    def check() -> str:
        workers = step.visit.jobs if step.visit.jobs > 2 else 0  # each imports everything for itself
        output = step.output_of("pytest", *_PYTEST, "-m", marker, "-n", str(workers), limit_s=600)
        return output.strip().splitlines()[-1].strip(" =")

    step.check(f"pytest -m '{marker}'", check)


def float64(step: Step, modes: Mapping[str, list[str]]) -> None:
    """Steps 4 and 5: in float64, does every mode on the device train what one CPU device trains? To 1e-9."""
    modes = chosen(dict(modes), on_gpu=step.visit.on_gpu)
    runs = dict(modes)
    references = {}
    for mode, flags in modes.items():
        alone = equivalent(flags)
        references[mode] = " ".join(["one CPU device", *alone])
        runs[references[mode]] = [*alone, _ON_CPU]
    usual = [*_TINY, *_THREE_STEPS[step.visit.accelerator], _FLOAT64, "--model.optimizer.lr=1e-4"]
    step.check_all({f"{name} runs": partial(_trained, step, name, *usual, *flags) for name, flags in runs.items()})
    _agree(step, references)


def precisions(step: Step) -> None:
    """Step 6: does every mode train in mixed precision? On a CPU Lightning takes bfloat16 in place of 16-mixed."""

    def check(name: str, flags: list[str]) -> str:
        losses = _losses(step.fit(name, *_TINY, *flags))
        if not all(map(math.isfinite, losses)):
            raise FailedError(f"losses {losses}")
        if not abs(losses[0] - math.log(10)) < 1:  # ten classes, and a network that has learned nothing yet
            raise FailedError(f"the first loss is {losses[0]:.3f}")
        return f"losses {losses[0]:.3f} to {losses[-1]:.3f}"

    runs = {
        f"{mode}, {precision}": [*flags, f"--trainer.precision={precision}"]
        for precision in (["bf16-mixed", "16-mixed"] if step.visit.on_gpu else ["bf16-mixed"])
        for mode, flags in chosen(ONE_PROCESS, on_gpu=step.visit.on_gpu).items()
    }
    step.check_all({name: partial(check, name, flags) for name, flags in runs.items()})


def saving(step: Step) -> None:
    """Step 7: a run that is stopped in an epoch goes on, on the device and on the CPU, whichever saved it."""

    def stopped(name: str, *flags: str) -> str:
        ended = step.run(name, *step.words("fit", name, *_TWO_EPOCHS, *_STOP, *flags))
        if ended.status != _STOPPED or not last_checkpoint(step.run_folder(name)).exists():
            raise FailedError(ended.last_words)
        (step.work / f"{name}.ckpt").write_bytes(
            last_checkpoint(step.run_folder(name)).read_bytes()
        )  # the run may go on
        return f"exit status {_STOPPED}, and a checkpoint"

    def resumed() -> str:
        step.output_of("resumed", *step.words("fit", "stopped", *_TWO_EPOCHS, "--resume=auto"))
        return "to its end"

    def tested() -> str:
        tables = {}
        for name, flags in {"tested": [], "tested-cpu": [_ON_CPU]}.items():
            step.output_of(name, *step.words("test", name, *_TWO_EPOCHS, *flags, f"--ckpt_path={whole}"))
            tables[name] = (step.run_folder(name) / "per_rank.csv").read_text()
        if len(set(tables.values())) != 1:
            raise FailedError(str(tables))
        return tables["tested"].splitlines()[-1]

    whole = last_checkpoint(step.run_folder("whole"))
    first_runs: dict[str, Check] = {
        "a whole run": partial(_trained, step, "whole", *_TWO_EPOCHS),
        "SIGTERM on the device": partial(stopped, "stopped"),
        "SIGTERM on the CPU": partial(stopped, "stopped-cpu", _ON_CPU),
    }
    step.check_all(first_runs)
    source = f"--ckpt_path={step.work}"
    later: dict[str, Check] = {
        "the same command goes on": resumed,
        "device to CPU": partial(_trained, step, "to-cpu", *_TWO_EPOCHS, _ON_CPU, f"{source}/stopped.ckpt"),
        "CPU to device": partial(_trained, step, "to-device", *_TWO_EPOCHS, f"{source}/stopped-cpu.ckpt"),
        "test on both": tested,
    }
    step.check_all(later)
    _agree(step, dict.fromkeys(["stopped", "to-cpu", "to-device"], "whole"))


def same_bits(step: Step, precision: str) -> None:
    """With virtual replicas, does every mode on the device end with the same bits?"""
    digests: dict[str, str] = {}

    def check(mode: str, flags: list[str]) -> str:
        # Seven steps, the last of ten images: its four parts are not equal.
        usual = [*_TINY, "--virtual_replicas=4", "--data.num_train=122", "--trainer.deterministic=true"]
        # Of a pipeline the parts are the microbatches, so their number is not chosen twice.
        own = [flag for flag in flags if "num_microbatches" not in flag]
        run = step.fit(f"{mode}, {precision}", *usual, *own, f"--trainer.precision={precision}")
        digests[mode] = (run / "weights.sha256").read_text().split()[0]
        return digests[mode]

    def one_digest() -> tuple[str, dict[str, str]]:
        if len(set(digests.values())) != 1 or len(digests) < len(modes):
            raise FailedError(str(digests))
        return f"{len(digests)} modes", digests

    modes = chosen(ONE_PROCESS, on_gpu=step.visit.on_gpu) | {"ddp-two-ranks": TWO_RANKS["ddp"]}
    modes = {name: flags for name, flags in modes.items() if name not in ("mp-micro", "fsdp2", "tp", "pp-zbv")}
    step.check_all({f"{name}, {precision} runs": partial(check, name, flags) for name, flags in modes.items()})
    step.check(f"{precision}: one digest", one_digest)


def bits(step: Step) -> None:
    """Step 8."""
    for precision in ["32-true", "bf16-mixed", "64-true"] if step.visit.on_gpu else ["32-true"]:
        same_bits(step, precision)


def _trained(step: Step, name: str, *flags: str) -> str:
    return f"{len(_losses(step.fit(name, *flags)))} steps"


def _losses(run: Path) -> list[float]:
    """Of every step, in the first process."""
    return [*logged(run, "train/loss_step").values()]


def _agree(step: Step, references: Mapping[str, str]) -> None:
    """Check that runs end as their references do; those that did not reach their end are left out."""

    def check(found: Path, expected: Path) -> tuple[str, dict[str, Any]]:
        problem, gaps = compare(found, expected)
        worst = ", ".join(f"{kind} {value:.1e}" for kind, value in gaps.items())
        if problem:
            raise FailedError(f"{problem} (largest: {worst})")
        return f"off by {worst}", gaps

    for name, other in references.items():
        pair = step.run_folder(name), step.run_folder(other)
        if all(last_checkpoint(run).exists() for run in pair):
            step.check(f"{name} agrees", partial(check, *pair))


@dataclass(frozen=True)
class Plan:
    """A step to take."""

    title: str
    take: Callable[[Step], None]
    limit_s: float  # after which it ends, whatever is left of it


PLANS = (
    Plan("import, versions, modes, first fit", first, limit_s=100),
    Plan("no host waits between log points", waits, limit_s=120),
    Plan("tests in one process", partial(tests, marker="not slow"), limit_s=120),
    Plan("float64: CPU against device", partial(float64, modes=ONE_PROCESS), limit_s=150),
    Plan("float64: two gloo ranks on one device", partial(float64, modes=TWO_RANKS), limit_s=120),
    Plan("mixed precision in every mode", precisions, limit_s=120),
    Plan("save, load, resume, SIGTERM", saving, limit_s=120),
    Plan("the same bits with virtual replicas", bits, limit_s=120),
    Plan("throughput, and where the time goes", speed.take, limit_s=240),
    Plan("tests that start processes", partial(tests, marker="slow"), limit_s=150),
)
