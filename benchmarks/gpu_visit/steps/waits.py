"""Step 2: does the host ever wait for the device between two log points?"""

import json
from collections.abc import Sequence
from functools import partial

from gpu_visit.modes import ONE_PROCESS, chosen
from gpu_visit.step import TINY, Check, FailedError, Step

# Fifteen steps in an epoch, none of which is a log point.
_FLAGS = (*TINY, "--data.num_train=256", "--trainer.log_every_n_steps=1000", "--trainer.limit_val_batches=0")
_BF16 = "--trainer.precision=bf16-mixed"


def take(step: Step) -> None:
    """Every mode, and a wait that is planted."""
    checks: dict[str, Check] = {"a planted wait": partial(_planted, step)}
    for mode in chosen(ONE_PROCESS, on_gpu=step.visit.on_gpu):
        checks[mode.name] = partial(_none, step, mode.name, mode.strategy)
    if step.visit.on_gpu:
        checks["single, bf16"] = partial(_none, step, "bf16", (_BF16,))
        checks["single, images on the host"] = partial(_none, step, "host", ("--data.resident=host",))
    step.check_all(checks)


def _none(step: Step, name: str, flags: Sequence[str]) -> str:
    places = _waits(step, name, flags)
    if places:
        shown = "; ".join(f"{count} x {place}" for place, count in sorted(places.items(), key=lambda item: -item[1]))
        raise FailedError(f"{sum(places.values())} waits: {shown}")
    return "no wait in 9 steps"


def _planted(step: Step) -> str:
    places = _waits(step, "planted", ["--trainer.callbacks.plant=true"])
    if sum(places.values()) != 1:
        raise FailedError(f"one wait was planted, and found were {places}")
    return "found"


def _waits(step: Step, name: str, flags: Sequence[str]) -> dict[str, int]:
    path = step.work / f"{name}.json"
    watch = ("--trainer.callbacks+=gpu_visit.host_waits.HostWaits", f"--trainer.callbacks.path={path}")
    step.fit(name, *_FLAGS, *watch, *flags)
    places: dict[str, int] = json.loads(path.read_text())["places"]
    return places
