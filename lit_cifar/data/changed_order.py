"""Whether a run that resumes would use other images than the one before, or in another order."""

import re

from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.data.dataset import DATASETS
from lit_cifar.data.sample_order import OrderSettings
from lit_cifar.errors import CheckpointError

_TRAIN, _VAL = _FILES = ("train files", "val files")  # settings that are no flags: digests of lists of files
_PUT_BACK = "put them back as they were"


def check_held_out(then: OrderSettings, now: OrderSettings) -> None:
    """Refuse to validate on images that were trained on, by the settings in the checkpoint, `then`, and `now`."""
    if not (others := _mixed(then, now)):
        return
    reason = "files were added, removed or moved"
    remedy = _PUT_BACK
    if not {*_FILES} & {*others}:
        reason, given = (_flags({name: each[name] for name in others if name in each}) for each in (now, then))
        remedy = f"pass {given}"
    problem = f"images that the checkpoint was trained on would be validated on: {reason}"
    raise CheckpointError(problem, remedy=f"{remedy}, or start a new training")


def check_rest_of_epoch(then: OrderSettings, now: OrderSettings) -> None:
    """Refuse to go on within an epoch whose batches would differ. The files to validate on may differ."""
    if then.get(_TRAIN) != now.get(_TRAIN):
        changes = "since then files to train on were added, removed or renamed"
        raise CheckpointError(f"the checkpoint was written within an epoch; {changes}", remedy=_PUT_BACK)
    before, asked = _changed(then, now)
    if before:
        other = "start a new training" if _mixed(then, now) else "resume a checkpoint from between two epochs"
        problem = f"the checkpoint was written within an epoch with {before}; {asked} would train on the rest otherwise"
        raise CheckpointError(problem, remedy=f"pass {before}, or {other}")


def tell_changed(then: OrderSettings, now: OrderSettings) -> None:
    """Say what a training had that goes on with other settings from a checkpoint."""
    before, asked = _changed(then, now)
    if before:
        rank_zero_warn(f"the training before had {before}; it goes on with {asked}")


def _changed(then: OrderSettings, now: OrderSettings) -> tuple[str, str]:
    """The flags that differ, as they were and as they are. Checkpoints of earlier releases lack some."""
    names = [name for name, value in now.items() if name not in _FILES and then.get(name, value) != value]
    return _flags({name: then[name] for name in names}), _flags({name: now[name] for name in names})


def _mixed(then: OrderSettings, now: OrderSettings) -> list[str]:
    """The settings by which images that were trained on would be validated on.

    A smaller `val_size` holds out a part of the same images. A folder to validate on may change, not one to train on.
    """
    own, before = _VAL in now, then.get("val_size")
    names = _FILES if own else (*_FILES, "num_train", "seed", "val_size")
    others = [name for name in names if then.get(name) != now.get(name)]
    if "val_size" in others and isinstance(before, int) and before > int(now["val_size"]):
        others.remove("val_size")
    validates = own or now["val_size"]
    return [] if not validates or (own and len(others) == 1) else others


def _flags(settings: OrderSettings) -> str:
    """Flags to paste. What is no value of ours is left open: what a checkpoint says may come from anybody."""
    values = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}
    known = re.compile("|".join([r"[\d.,e+\[\]-]*|true|false|balanced|null", *DATASETS]))
    return " ".join(f"--data.{name}={it if known.fullmatch(it) else '...'}" for name, it in values.items())
