"""Step 6: does every mode train in mixed precision?"""

import csv
import math
from functools import partial
from pathlib import Path

from gpu_visit.modes import ONE_PROCESS, OnOneDevice, chosen
from gpu_visit.step import TINY, Check, FailedError, Step

_REFUSED = 2  # exit status


def take(step: Step) -> None:
    """bf16-mixed; then 16-mixed, which modes refuse that cannot scale a loss."""
    modes = chosen(ONE_PROCESS, on_gpu=step.visit.on_gpu)
    checks: dict[str, Check] = {
        f"{mode.name}, bf16-mixed": partial(_trains, step, mode, "bf16-mixed") for mode in modes
    }
    for mode in modes if step.visit.on_gpu else ():  # on a CPU Lightning takes bfloat16 in its place
        if mode.scales_loss:
            checks[f"{mode.name}, 16-mixed"] = partial(_trains, step, mode, "16-mixed")
        else:
            checks[f"{mode.name}, 16-mixed is refused"] = partial(_refuses, step, mode)
    step.check_all(checks)


def _trains(step: Step, mode: OnOneDevice, precision: str) -> str:
    found = _losses(step.fit(f"{mode.name}-{precision}", *TINY, *mode.strategy, f"--trainer.precision={precision}"))
    if not all(map(math.isfinite, found)):
        raise FailedError(f"losses {found}")
    # Ten classes, and a network that has learned nothing yet.
    if not abs(found[0] - math.log(10)) < 1:
        raise FailedError(f"the first loss is {found[0]:.3f}")
    return f"losses {found[0]:.3f} to {found[-1]:.3f}"


def _refuses(step: Step, mode: OnOneDevice) -> str:
    name = f"{mode.name}-refused"
    ended = step.run(name, *step.fit_words(name, *TINY, *mode.strategy, "--trainer.precision=16-mixed"))
    if ended.status != _REFUSED:
        raise FailedError(ended.last_words)
    return ended.output.splitlines()[0] if ended.output else "refused"


def _losses(folder: Path) -> list[float]:
    """Of every step."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss_step"]) for row in csv.DictReader(file) if row.get("train/loss_step")]
