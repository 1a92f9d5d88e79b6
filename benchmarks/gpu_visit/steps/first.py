"""Step 1: does it import, what is there, and does a short training run?"""

import json
from functools import partial

from gpu_visit.step import TINY, FailedError, Step

_FIVE_STEPS = (*TINY, "--trainer.max_steps=5")


def take(step: Step) -> None:
    """One check after the other; the last decides how all later runs are started."""
    step.check("versions", partial(_versions, step))
    if step.visit.site is not None:
        step.check("wheels", partial(_wheels, step))
    step.check("modes", partial(_modes, step))
    if step.visit.on_gpu:  # else nothing distinguishes the two
        step.check("fit in a process of its own", partial(_fit, step, forked=False))
    if not step.check("fit in a forked process", partial(_fit, step, forked=True)):
        step.visit.forked = False
        step.found("later runs", "info", "each imports everything anew, as forked processes cannot train here")


def _versions(step: Step) -> tuple[str, dict[str, object]]:
    found = json.loads(step.output_of("versions", "gpu_visit.versions").splitlines()[-1])
    if step.visit.on_gpu and found["gpu"] is None:
        raise FailedError("torch finds no GPU")
    names = ("gpu", "torch", "torchvision", "lightning", "python", "cuda", "cudnn", "nccl", "cores")
    return ", ".join(f"{name} {found[name]}" for name in names if found.get(name)), found


def _wheels(step: Step) -> str:
    """The package as it was installed, seen from another folder than the checkout's."""
    return step.output_of("wheels", "gpu_visit.installed", str(step.visit.site)).splitlines()[-1]


def _modes(step: Step) -> str:
    output = step.output_of("modes", "lit_cifar", "modes")
    device = "GPU" if step.visit.on_gpu else "CPU"
    lines = [" ".join(line.split()) for line in output.splitlines() if f" {device}" in line]
    if not lines:
        raise FailedError(f"no line of the table says {device}")
    return lines[0]


def _fit(step: Step, *, forked: bool) -> str:
    folder = step.fit(f"fit-{'forked' if forked else 'alone'}", *_FIVE_STEPS, forked=forked)
    num_rows = len((folder / "metrics.csv").read_text().splitlines()) - 1
    checkpoint = folder / "checkpoints" / "last.ckpt"
    if not checkpoint.exists() or num_rows < 5:
        raise FailedError(f"{num_rows} rows of metrics, checkpoint: {checkpoint.exists()}")
    return "5 steps and a checkpoint"
