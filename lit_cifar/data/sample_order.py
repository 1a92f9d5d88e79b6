"""Settings that decide which image is used in which step. Checkpoints hold them, to compare with a resumed run's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_cifar.errors import CheckpointError, ConfigError, printable

OrderSettings = dict[str, int | str]

_TRAIN, _VAL = _FILES = ("train files", "val files")  # settings that are no flags: digests of lists of files
_PUT_BACK = "put them back as they were, with an empty file in place of each picture that could not be read then"


@dataclass(frozen=True, kw_only=True)
class Order:
    """In which order images are trained on, and which are left out or repeated.

    Args:
        shuffle: Draw a new permutation for each epoch. With false every epoch has the order of the files.
        frozen: Repeat the order of the first epoch in every epoch, as a forgotten `set_epoch` does. For study.
        drop_last: Leave out the last batch of an epoch if it is not full. With false it is weighted by its size.
        pad_eval: Repeat samples until each process evaluates equally many, as torch's DistributedSampler does, and
            count them twice. For study.
    """

    shuffle: bool = True
    frozen: bool = False
    drop_last: bool = False
    pad_eval: bool = False

    def __post_init__(self) -> None:
        if self.frozen and not self.shuffle:
            problem = "--data.order.frozen=true repeats one shuffled order, and --data.order.shuffle=false has none"
            raise ConfigError(problem, remedy="leave one of the two out")


def order_settings(data: Any) -> OrderSettings:
    """The settings by the flags of the data module `data`, after its `setup` to fit or to validate."""
    sampler, listed = data.train_sampler(), data.source.listed
    held_out = 0 if data.source.own_val else data.val_size
    files = {f"{split} files": listed[split] for split in ("train", "val") if split in listed}
    return files | {
        "dataset": data.dataset,
        "num_train": sampler.num_samples + held_out,
        "val_size": held_out,
        "batch_size": sampler.batch_size,
        "seed": sampler.seed,
        "order.shuffle": sampler.shuffle,
        "order.frozen": sampler.frozen,
        "order.drop_last": sampler.drop_last,
        "balance.draw_equally": sampler.balanced is not None,
    }


def settings_in(checkpoint: Mapping[str, Any]) -> OrderSettings | None:
    """The settings in a checkpoint, which Lightning writes under the name of the data module's class."""
    states = (value for value in checkpoint.values() if isinstance(value, dict))
    return next((state for state in states if {"num_train", "val_size", "seed", "steps"} <= {*state}), None)


def check_held_out(then: OrderSettings, now: OrderSettings) -> None:
    """Refuse to validate on images that were trained on.

    `then` are the settings in the checkpoint, `now` those of this run.
    """
    if not (others := _mixed(then, now)):
        return
    reason = "files were added, removed or moved, or others can be read"
    remedy = _PUT_BACK
    if not {*_FILES} & {*others}:
        reason, given = (_flags({name: each[name] for name in others if name in each}) for each in (now, then))
        remedy = f"pass {given}"
    problem = f"images that the checkpoint was trained on would be validated on: {reason}"
    raise CheckpointError(problem, remedy=f"{remedy}, or start a new training")


def check_rest_of_epoch(then: OrderSettings, now: OrderSettings) -> None:
    """Refuse to go on within an epoch whose batches would differ. The files to validate on may differ."""
    if then.get(_TRAIN) != now.get(_TRAIN):
        raise CheckpointError(
            "the checkpoint was written within an epoch; since then files to train on were added, removed or renamed, "
            "or others can be read",
            remedy=_PUT_BACK,
        )
    names = [name for name, value in now.items() if name not in _FILES and then.get(name) != value]
    if names:
        before = _flags({name: then[name] for name in names if name in then})
        other = "start a new training" if _mixed(then, now) else "resume a checkpoint from between two epochs"
        raise CheckpointError(
            f"the checkpoint was written within an epoch with {before}; {_flags({name: now[name] for name in names})} "
            "would order the rest of it otherwise",
            remedy=f"pass {before}, or {other}",
        )


def _mixed(then: OrderSettings, now: OrderSettings) -> list[str]:
    """The settings by which images that were trained on would be validated on.

    A smaller `val_size` holds out a part of the same images. The user's folder to validate on may change, unless files
    to train on are gone.
    """
    own, before = _VAL in now, then.get("val_size")
    names = _FILES if own else (*_FILES, "num_train", "seed", "val_size")
    others = [name for name in names if then.get(name) != now.get(name)]
    if "val_size" in others and isinstance(before, int) and before > int(now["val_size"]):
        others.remove("val_size")
    validates = own or now["val_size"]
    return [] if not validates or (own and len(others) == 1) else others


def _flags(settings: OrderSettings) -> str:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return printable(" ".join(f"--data.{name}={value}" for name, value in values.items()))
