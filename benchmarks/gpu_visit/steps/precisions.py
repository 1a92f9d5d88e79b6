"""Step 6: does every mode train in mixed precision?"""

import csv
import math
from functools import partial
from pathlib import Path

from gpu_visit.modes import ONE_PROCESS, OnOneDevice, chosen
from gpu_visit.step import TINY, FailedError, Step


def take(step: Step) -> None:
    """bf16-mixed, and on a GPU 16-mixed: on a CPU Lightning takes bfloat16 in its place."""
    modes = chosen(ONE_PROCESS, on_gpu=step.visit.on_gpu)
    precisions = ["bf16-mixed", "16-mixed"] if step.visit.on_gpu else ["bf16-mixed"]
    step.check_all(
        {
            f"{mode.name}, {precision}": partial(_trains, step, mode, precision)
            for precision in precisions
            for mode in modes
        }
    )


def _trains(step: Step, mode: OnOneDevice, precision: str) -> str:
    found = _losses(step.fit(f"{mode.name}-{precision}", *TINY, *mode.strategy, f"--trainer.precision={precision}"))
    if not all(map(math.isfinite, found)):
        raise FailedError(f"losses {found}")
    # Ten classes, and a network that has learned nothing yet.
    if not abs(found[0] - math.log(10)) < 1:
        raise FailedError(f"the first loss is {found[0]:.3f}")
    return f"losses {found[0]:.3f} to {found[-1]:.3f}"


def _losses(folder: Path) -> list[float]:
    """Of every step."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss_step"]) for row in csv.DictReader(file) if row.get("train/loss_step")]
