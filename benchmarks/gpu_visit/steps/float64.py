"""Steps 4 and 5: in float64, does every mode on the device train what one CPU device trains? To 1e-9."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gpu_visit.modes import ONE_PROCESS, TWO_RANKS, OnOneDevice, chosen
from gpu_visit.step import Check, FailedError, Step

_TRACE = "lit_cifar.tools.verify.recorder.Trace"
_STEPS = 3
_FLAGS = (
    "--model.stem=imagenet",
    "--model.optimizer.lr=1e-4",
    "--data.dataset=synthetic",
    "--data.num_test=1",
    "--trainer.precision=64-true",
    f"--trainer.max_steps={_STEPS}",
    "--trainer.max_epochs=-1",
    "--trainer.log_every_n_steps=1",
    "--trainer.check_val_every_n_epoch=null",
    f"--trainer.val_check_interval={_STEPS}",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.enable_progress_bar=false",
)
# The third batch is half as long as the others.
_SIZES = {
    "cuda": ("--model.arch=resnet34", "--data.num_train=261", "--data.val_size=101", "--data.batch_size=64"),
    "cpu": ("--data.num_train=61", "--data.val_size=21", "--data.batch_size=16"),
}


def take_one_process(step: Step) -> None:
    """Those that one process can run."""
    _take(step, chosen(ONE_PROCESS, on_gpu=step.visit.on_gpu))


def take_two_ranks(step: Step) -> None:
    """Those that two processes on one device can."""
    _take(step, chosen(TWO_RANKS, on_gpu=step.visit.on_gpu))


def _take(step: Step, modes: list[OnOneDevice]) -> None:
    """The runs of one CPU device and of the modes at the same time; then the comparisons."""
    expected = {chunks: f"expected{number}" for number, chunks in enumerate({mode.chunks: None for mode in modes})}
    runs: dict[str, Check] = {}
    for chunks, name in expected.items():
        title = " ".join(["one CPU device", *chunks])
        runs[title] = partial(_fit, step, name, (*chunks, "--trainer.accelerator=cpu"))
    for mode in modes:
        runs[f"{mode.name} runs"] = partial(_fit, step, mode.name, mode.strategy)
    step.check_all(runs)
    pairs = {mode.name: expected[mode.chunks] for mode in modes}
    finished = {found: name for found, name in pairs.items() if _has_ended(step, found) and _has_ended(step, name)}
    if finished:
        results = compared(step, {step.work / found: step.work / name for found, name in finished.items()})
        for name in finished:
            step.check(f"{name} agrees", partial(agreement, results[str(step.work / name)]))


def _has_ended(step: Step, name: str) -> bool:
    """Whether the run of that name has written its last file."""
    return (step.run_folder(name) / "checkpoints" / "last.ckpt").exists()


def _fit(step: Step, name: str, flags: tuple[str, ...]) -> str:
    trace = step.work / name / "trace"
    trace.mkdir(parents=True)
    recording = [f"--trainer.callbacks+={_TRACE}", f"--trainer.callbacks.folder={trace}"]
    recording += [f"--trainer.callbacks.reload_after={_STEPS - 1}"]
    step.fit(name, *_FLAGS, *_SIZES[step.visit.accelerator], *recording, *flags)
    return f"{_STEPS} steps"


def compared(step: Step, pairs: Mapping[Path, Path]) -> dict[str, dict[str, Any]]:
    """What `gpu_visit.compare` says of each pair, by the first of the two.

    Raises:
        FailedError: It says nothing.
        OutOfTimeError: As of `Step.run`.
    """
    words = [str(path) for pair in pairs.items() for path in pair]
    lines = step.output_of("compare", "gpu_visit.compare", *words).splitlines()
    results: dict[str, dict[str, Any]] = json.loads(lines[-1])
    return results


def agreement(result: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """In words, for a check."""
    worst = ", ".join(f"{kind} {value:.1e}" for kind, value in result["differences"].items())
    if result["problems"]:
        raise FailedError("; ".join(result["problems"][:3]) + f" (largest: {worst})")
    return f"off by {worst}", dict(result)
