"""Step 8: with virtual replicas, does every mode on the device end with the same bits?"""

from functools import partial

from gpu_visit.modes import ONE_PROCESS, TWO_RANKS, OnOneDevice, chosen
from gpu_visit.step import TINY, Check, FailedError, Step

_MODES = ("single", "dp-twice", "mp", "ddp", "pp-interleaved", "ddp-two-ranks")
# Seven steps, the last of ten images: its four parts are not equal.
_FLAGS = (*TINY, "--virtual_replicas=4", "--data.num_train=122", "--trainer.deterministic=true")
_PRECISIONS = ("32-true", "bf16-mixed", "64-true")


def take(step: Step) -> None:
    """All runs at once, then one comparison for each precision."""
    on_gpu = step.visit.on_gpu
    two_ranks = [OnOneDevice("ddp-two-ranks", m.strategy) for m in chosen(TWO_RANKS, on_gpu=False)]
    modes = [mode for mode in [*chosen(ONE_PROCESS, on_gpu=on_gpu), *two_ranks] if mode.name in _MODES]
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
    folder = step.fit(f"{mode.name}-{precision}", *_FLAGS, *_parts_of(mode), f"--trainer.precision={precision}")
    return (folder / "weights.sha256").read_text().split()[0]


def _parts_of(mode: OnOneDevice) -> list[str]:
    """A part is a microbatch there, so its number is not chosen twice."""
    return [flag for flag in mode.strategy if "num_microbatches" not in flag]


def _equal(step: Step, names: list[str], precision: str) -> tuple[str, dict[str, str]]:
    files = {name: step.run_folder(f"{name}-{precision}") / "weights.sha256" for name in names}
    digests = {name: file.read_text().split()[0] for name, file in files.items() if file.exists()}
    if len(digests) < len(names):
        raise FailedError(f"no digest of {', '.join(names - digests.keys())}")
    if len(set(digests.values())) > 1:
        raise FailedError(str(digests))
    return f"{len(names)} modes", digests
