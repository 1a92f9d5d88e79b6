"""Step 8: with virtual replicas, does every mode on the device end with the same bits?"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from gpu_visit.modes import ONE_PROCESS, TWO_RANKS, OnOneDevice, chosen
from gpu_visit.step import TINY, Check, FailedError, Step

_MODES = ("single", "dp-twice", "mp", "ddp", "pp-interleaved", "ddp-two-ranks")
# Seven steps, the last of ten images: its four parts are not equal.
_FLAGS = (*TINY, "--virtual_replicas=4", "--data.num_train=122", "--trainer.deterministic=true")
_PRECISIONS = ("32-true", "bf16-mixed", "64-true")


def take(step: Step) -> None:
    """All runs at once, then one comparison for each precision."""
    on_gpu = step.visit.on_gpu
    two_ranks = next(replace(mode, name="ddp-two-ranks") for mode in TWO_RANKS if mode.name == "ddp")
    modes = [mode for mode in [*chosen(ONE_PROCESS, on_gpu=on_gpu), two_ranks] if mode.name in _MODES]
    precisions = _PRECISIONS if on_gpu else _PRECISIONS[:1]
    runs: dict[str, Check] = {
        f"{mode.name}, {precision} runs": partial(_fit, step, mode, precision)
        for precision in precisions
        for mode in modes
    }
    step.check_all(runs)
    for precision in precisions:
        step.check(f"{precision}: one digest", partial(_equal, step, [mode.name for mode in modes], precision))


def _fit(step: Step, mode: OnOneDevice, precision: str) -> str:
    # Of a pipeline the parts are the microbatches, so their number is not chosen twice.
    strategy = [flag for flag in mode.strategy if "num_microbatches" not in flag]
    return _digest(step.fit(f"{mode.name}-{precision}", *_FLAGS, *strategy, f"--trainer.precision={precision}"))


def _digest(run_folder: Path) -> str:
    """Of the only epoch; empty if there is none."""
    file = run_folder / "weights.sha256"
    return file.read_text().split()[0] if file.exists() else ""


def _equal(step: Step, names: list[str], precision: str) -> tuple[str, dict[str, str]]:
    digests = {name: _digest(step.run_folder(f"{name}-{precision}")) for name in names}
    if missing := [name for name, digest in digests.items() if not digest]:
        raise FailedError(f"no digest of {', '.join(missing)}")
    if len(set(digests.values())) > 1:
        raise FailedError(str(digests))
    return f"{len(names)} modes", digests
