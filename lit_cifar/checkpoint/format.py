"""Entries of a checkpoint, and opening a file without running code from it, or believing what it holds."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor

from lit_cifar.checkpoint.content import check_content, described
from lit_cifar.errors import CheckpointError, ConfigError
from lit_cifar.models import Arch, Stem

_KEY = "lit_cifar"
_NUMBER = 2  # of this format; that of version 0.1 had none
OPTIMIZER, SCHEDULE = "optimizer", "lr_scheduler"
SETTINGS = "settings"  # entry of the settings of optimizer and schedule
POSITION, METRICS, STOPPED = "position", "metrics", "stopped"  # the entries of `exact_resume`
AVERAGED = "current_model_state"  # Lightning's entry of the trained weights where `state_dict` has their average
SAVE_ALONE = "save those of one network alone: torch.save(network.state_dict(), 'weights.pth')"
_DATA = "trained_on"


@dataclass(frozen=True, kw_only=True)
class Header:
    """The network that a checkpoint belongs to; the fields are arguments of `LitResNet`."""

    arch: Arch | None  # one of this package's networks; None for the user's own
    stem: Stem | None  # stem of a ResNet
    num_classes: int  # size of the logits
    image_size: int = 32  # height and width of the training images, in pixels
    # The class of the user's own network, such as "my_package.Net": compared, never imported, as that would run code.
    network: str | None = None
    format: int = _NUMBER

    def write(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = asdict(self)

    @classmethod
    def read(cls, checkpoint: dict[str, Any]) -> "Header":
        """The header of `checkpoint`, which must have one."""
        check_entries(checkpoint)
        if not is_own(checkpoint):
            remedy = "pass one that `python -m lit_cifar fit` wrote"
            raise CheckpointError("this checkpoint has no lit_cifar header that says its network", remedy=remedy)
        return cls(**checkpoint[_KEY])

    def arguments(self) -> dict[str, Any]:
        """Arguments that make the network; the caller must pass the user's own network."""
        return {name: value for name, value in asdict(self).items() if name not in ("network", "format")}

    def __str__(self) -> str:
        size = "" if self.image_size == 32 else f", {self.image_size} x {self.image_size} images"
        stem = f"the {self.stem} stem and " if self.stem else ""
        return f"{self.name} with {stem}{self.num_classes} classes{size}"

    @property
    def name(self) -> str:
        return self.arch or self.network or "no network"


@dataclass(frozen=True)
class TrainedOn:
    """The data of a checkpoint's training, by which its logits have a meaning."""

    dataset: str  # a value of `--data.dataset`
    classes: tuple[str, ...]  # names by label

    def write(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_DATA] = {"dataset": self.dataset, "classes": [*self.classes]}

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> "TrainedOn | None":
        """Data set and classes in `checkpoint`, if it names them."""
        found = checkpoint.get(_DATA)
        return None if found is None else cls(found["dataset"], tuple(found["classes"]))


# What is read of a checkpoint that a fit has written, and what it may be.
_VERSION = "pytorch-lightning_version"  # by which Lightning decides to convert the rest
_Release = Annotated[str, r"[2-9]\d*(\.\d+)+((a|b|rc|\.post|\.dev)\d+)*(\+[a-z0-9.]+)?"]
_BESIDE = {  # what a fit writes with an entry
    "optimizer_states": (_VERSION, "epoch", "global_step", "state_dict", "loops", "callbacks", "lr_schedulers"),
    AVERAGED: ("averaging_state",),
}
_ENTRIES: dict[str, Any] = {
    _KEY: Header,
    _VERSION: _Release,
    "epoch": int,
    "global_step": int,
    "state_dict": dict[str, Tensor],
    "optimizer_states": [{"state": {}, "param_groups": list[dict[str, Any]]}],
    "lr_schedulers": list[dict[str, Any]],
    "loops": {
        "fit_loop": {
            "epoch_loop.val_loop.batch_progress": {},
            "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": {"total": {"completed": int}}}},
        }
    },
    "callbacks": dict[str, Any],
    OPTIMIZER: str,
    SCHEDULE: str,
    SETTINGS: dict[str, bool | float | str | list | tuple | dict | None],  # type: ignore[type-arg]
    METRICS: dict[str, dict[str, Tensor]],
    STOPPED: list[dict[str, bool | float | Annotated[str, "(?s).*"]]] | None,
    AVERAGED: dict[str, Tensor],
    "averaging_state": dict[str, Tensor],  # its counts
    _DATA: TrainedOn,
}


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Put the name of a checkpoint in front of an error about its content."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{path}: {error.problem}", remedy=error.remedy) from error


def holds_training(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a training can go on from a checkpoint, not only start with its weights."""
    return "optimizer_states" in checkpoint


def is_own(checkpoint: Mapping[str, Any]) -> bool:
    return _KEY in checkpoint


def class_path(part: Any) -> str:
    """The shortest path of a class that a user can type. It stays when a file moves inside its package."""
    kind = type(part)
    name: str = kind.__name__
    if getattr(torch.optim, name, None) is kind:
        return name
    package = kind.__module__.partition(".")[0]
    exported = getattr(sys.modules[package], kind.__name__, None) is kind
    return f"{package if exported else kind.__module__}.{kind.__qualname__}"


def read_checkpoint(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Open a file of any program with `weights_only=True`, on the CPU.

    If it is `mapped`, a tensor is read only where it is looked at; torch cannot do so with files of its first releases.

    Raises:
        CheckpointError: There is none, it does not match its checksums, or neither torch nor this version reads it.
    """
    try:
        check_is_file(path)
        is_damaged = not _is_whole(path)
        with path.open("rb") as file:
            # 8 bytes, the length of a JSON object, stand before it: https://github.com/huggingface/safetensors.
            is_safetensors = file.read(9)[8:] == b"{"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if is_damaged:
        raise CheckpointError(f"{path} is damaged: its content does not match the checksums that it carries")
    try:
        if is_safetensors:
            return dict(import_module("safetensors.torch").load_file(path))
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and is_zipfile(path))
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{path} needs the package safetensors", remedy="pip install safetensors") from error
    except Exception as error:  # torch raises half a dozen types here, depending on what is broken
        code = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error))
        reason = f"it needs the code of {code[1]}" if code else "it is incomplete, or torch has not written it"
        remedy = f"use another of the run's checkpoints; of another program, {SAVE_ALONE}"
        raise CheckpointError(f"{path} is not a readable checkpoint: {reason}", remedy=remedy) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(checkpoint).__name__}")
    with naming(path):
        _check_names(checkpoint, iter(range(2 * 10**6)))
        check_entries(checkpoint, "this file")
    return checkpoint


def _is_whole(path: Path) -> bool:
    """Whether a file matches the checksums that it carries, if it carries any.

    `torch.save` writes a zip archive with checksums of its parts, which `torch.load` ignores. They are no signature.
    """
    try:
        if not is_zipfile(path):  # it is truncated, or of another program
            return True
        with ZipFile(path) as archive:
            return archive.testzip() is None
    except OSError:
        raise
    except Exception:  # half a dozen types, depending on what is broken
        return False


def check_entries(checkpoint: Mapping[str, Any], name: Path | str = "this checkpoint") -> None:
    """Raise a `CheckpointError` for a checkpoint of a fit that has another format, or entries that no fit writes."""
    if not is_own(checkpoint):
        return
    header = checkpoint[_KEY]
    if isinstance(header, dict) and header.get("format") != _NUMBER:
        raise _earlier_format(name)
    check_content(checkpoint, _ENTRIES, partly=True)
    for entry, others in _BESIDE.items():
        check_content(checkpoint, dict.fromkeys(others) if entry in checkpoint else {})


def _check_names(content: Any, left: Iterator[int], levels: int = 50) -> None:
    """Refuse names that a message cannot show, at any depth of a file of any program, and what contains itself."""
    if not levels or next(left, None) is None:
        raise CheckpointError("it holds too many objects in one another", remedy=SAVE_ALONE)
    parts = dict(enumerate(content)) if isinstance(content, list | tuple) else content
    for name, value in parts.items() if isinstance(parts, dict) else ():
        if not str(name).isprintable():
            raise CheckpointError(f"it holds the name {described(name)}", remedy=SAVE_ALONE)
        _check_names(value, left, levels - 1)


def check_is_file(path: Path) -> None:
    """Refuse what is no file; a pipe would wait for whoever writes into it."""
    if (path / ".metadata").exists():
        raise _earlier_format(path)
    if not path.is_file():
        problem = f"{path} is a folder, and no checkpoint" if path.is_dir() else f"there is no checkpoint {path}"
        raise CheckpointError(problem, remedy="look under RUN_FOLDER/checkpoints/")


def _earlier_format(name: Path | str) -> CheckpointError:
    """The error that `name` is a checkpoint of version 0.1, which could be a folder too."""
    problem = f"{name} is of before version 0.2.0: `git checkout 23031ca` reads it"
    return CheckpointError(problem, remedy="or pass a checkpoint of this version")
