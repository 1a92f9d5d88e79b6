"""Every mode on any number of devices, and the mode that is fastest."""

from collections.abc import Callable, Sequence
from functools import partial

from lit_cifar.bench.forecast.divided import fsdp2, tp
from lit_cifar.bench.forecast.inputs import Job
from lit_cifar.bench.forecast.prediction import Prediction
from lit_cifar.bench.forecast.replicated import ddp, dp, single
from lit_cifar.bench.forecast.staged import ddp_mp, ddp_pp, mp, num_microbatches, pp
from lit_cifar.modes import MODES

DEVICES = tuple(2**power for power in range(11))
"""Numbers of devices that are forecast: 1 to 1,024."""
_PREDICT: dict[str, Callable[[Job, int, int], Prediction]] = {
    "single": single,
    "dp": dp,
    "ddp": ddp,
    "ddp_spawn": partial(ddp, mode="ddp_spawn"),
    "mp": mp,
    "ddp_mp": ddp_mp,
    "pp": pp,
    "ddp_pp": ddp_pp,
    "fsdp2": fsdp2,
    "tp": tp,
}
_ALIKE = 1.02  # a forecast is not more exact
_INSIDE = ("dp", "mp")  # one process, and so one machine
_STAGES = {"mp": None, "pp": None, "ddp_mp": 2, "ddp_pp": 2}  # None: as many as devices


def predict(job: Job, mode: str, num_devices: int, batch_size: int) -> Prediction | None:
    """None if the mode cannot use so many devices, or has less than one image for each microbatch."""
    known = next(each for each in MODES if each.name == mode)
    if num_devices not in known.counts(num_devices) or (mode == "single") != (num_devices == 1):
        return None
    if mode in _INSIDE and num_devices > job.machine.num_devices:
        return None
    if mode in _STAGES and (_STAGES[mode] or num_devices) > len(job.network.layers):
        return None
    return None if batch_size < _fewest_images(mode, num_devices) else _PREDICT[mode](job, num_devices, batch_size)


def predictions(job: Job, num_devices: int, batch_size: int) -> list[Prediction]:
    """Of every mode that works on so many devices, in the order of `MODES`."""
    found = (predict(job, mode.name, num_devices, batch_size) for mode in MODES)
    return [each for each in found if each is not None]


def fastest(candidates: Sequence[Prediction], memory_bytes: float) -> Prediction | None:
    """Of those whose memory suffices; None if there is none. Of those about as fast, the first."""
    fitting = [each for each in candidates if each.memory.total <= memory_bytes]
    best = min((each.step_s for each in fitting), default=0.0)
    return next((each for each in fitting if each.step_s <= _ALIKE * best), None)


def _fewest_images(mode: str, num_devices: int) -> int:
    if mode == "pp":
        return num_microbatches(num_devices)
    if mode == "ddp_pp":
        return num_devices // 2 * num_microbatches(2)
    if mode == "ddp_mp":
        return num_devices // 2
    return num_devices if mode in ("dp", "ddp", "ddp_spawn", "fsdp2") else 1
