"""Settings that decide which image is used in which step, and how; checkpoints hold them, for a run that resumes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from lit_cifar.data.augment import Augment
from lit_cifar.errors import printable

OrderSettings = dict[str, int | float | str]


@dataclass(frozen=True, kw_only=True)
class Order:
    """In which order images are trained on, and which are left out or repeated.

    Args:
        frozen: Repeat the order of the first epoch in every epoch, as a forgotten `set_epoch` does. For study.
        drop_last: Leave out the last batch of an epoch if it is not full. With false it is weighted by its size.
        pad_eval: Repeat samples until processes evaluate equally many, as DistributedSampler does. They count twice.
    """

    frozen: bool = False
    drop_last: bool = False
    pad_eval: bool = False


def order_settings(data: Any) -> OrderSettings:
    """The settings by the flags of the data module `data`, after its `setup` to fit or to validate."""
    sampler, listed = data.train_sampler(), data.source.listed
    held_out = 0 if data.source.own_val else data.val_size
    weights = data.balance.class_weights
    files = {f"{split} files": listed[split] for split in ("train", "val") if split in listed}
    return files | {
        "dataset": data.source.identity(data.dataset),
        "num_train": sampler.num_samples + held_out,
        "val_size": held_out,
        "batch_size": sampler.batch_size,
        "seed": sampler.seed,
        "order.frozen": sampler.frozen,
        "order.drop_last": sampler.drop_last,
        "balance.draw_equally": sampler.balanced is not None,
        "balance.class_weights": "null" if weights is None else str(weights).replace(" ", ""),
        "mixing.mixup": data.mixing.mixup,
        "mixing.cutmix": data.mixing.cutmix,
        **data.augment_settings,
    }


def augment_settings(augment: Augment | Literal[False]) -> OrderSettings:
    """Those of `augment`, to be read before it is used: a transform may keep what it finds in images."""
    settings = vars(augment) if augment else {}
    texts = {f"augment.{name}": _text(it) if isinstance(it, list) else it for name, it in settings.items()}
    return {"augment": bool(augment), **texts}


def _text(value: Any) -> str:
    """What tells a setting from others: of a module all that it holds. Its own text lacks some, as RandomApply's."""
    if isinstance(value, nn.Module) or (callable(value) and repr(value) == object.__repr__(value)):
        held, usual = getattr(value, "__dict__", {}), vars(nn.Module())
        own = {name: it for name, it in held.items() if name not in usual or it != usual[name]}
        return type(value).__qualname__ + _text(own)
    if isinstance(value, Mapping):
        value = [f"{name}={_text(it)}" for name, it in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        texts = map(_text, value)
        return f"[{','.join(sorted(texts) if isinstance(value, set | frozenset) else texts)}]"
    if isinstance(value, Tensor | np.ndarray):
        value = sha256(str(value.tolist()).encode()).hexdigest()
    return printable(re.sub(r" at 0x\w+", "", str(value)))  # without an object's place in the memory


def settings_in(checkpoint: Mapping[str, Any]) -> OrderSettings | None:
    """The settings in a checkpoint, which Lightning writes under the name of the data module's class."""
    states = (value for value in checkpoint.values() if isinstance(value, dict))
    return next((state for state in states if {"num_train", "val_size", "seed", "steps"} <= {*state}), None)
