"""What a checkpoint holds beside Lightning's own entries, and how to open one without running code from it."""

import re
import warnings
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_cifar.errors import CheckpointError
from lit_cifar.models.resnet import BLOCKS, NUM_FEATURES

_KEY = "lit_cifar"
_PREFIX = "network."
_T = TypeVar("_T")
_OTHER = "pass weights of torchvision's resnet18 or resnet34, or a checkpoint of `python -m lit_cifar fit`"


@dataclass(frozen=True, kw_only=True)
class Header:
    """Which network a checkpoint belongs to; its fields are `build_resnet`'s arguments."""

    arch: str
    stem: str
    num_classes: int

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Put the header into `checkpoint`."""
        checkpoint[_KEY] = asdict(self)

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> "Header":
        """The header of `checkpoint`, which must have one."""
        found = checkpoint.get(_KEY)
        if not isinstance(found, dict) or found.keys() != {field.name for field in fields(cls)}:
            raise CheckpointError(
                "this checkpoint has no lit_cifar header that says which network it holds",
                remedy="pass one that `python -m lit_cifar fit` wrote",
            )
        return cls(**found)

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Raise a `CheckpointError` unless `checkpoint` holds this network."""
        self._compare(Header.of(checkpoint))

    def check_weights(self, weights: Mapping[str, Tensor], *, any_classes: bool) -> None:
        """Raise a `CheckpointError` unless the shapes of `weights` are those of this network.

        Args:
            weights: A network's `state_dict()`.
            any_classes: Whether the number of classes may differ, as a training may start with a new classifier.
        """
        found = self._of_weights(weights)
        if not any_classes and found.num_classes != self.num_classes:
            raise CheckpointError(
                f"these weights have {found.num_classes} classes, the model has {self.num_classes}",
                remedy="train a new classifier on them first: python -m lit_cifar fit --ckpt_path=FILE",
            )
        self._compare(replace(found, num_classes=self.num_classes))

    def _compare(self, found: "Header") -> None:
        if found != self:
            flags = " ".join(f"--model.{name}={value}" for name, value in asdict(found).items())
            raise CheckpointError(
                f"the checkpoint holds {found}, the model is {self}", remedy=f"to use this checkpoint pass {flags}"
            )

    def _of_weights(self, weights: Mapping[str, Tensor]) -> "Header":
        """The header that the shapes imply; of two stems with equal shapes, this header's."""
        num_blocks = [len({key.split(".")[1] for key in weights if key.startswith(f"layer{i}.")}) for i in range(1, 5)]
        num_features = weights["fc.weight"].shape[-1] if "fc.weight" in weights else 0
        archs = [arch for arch in BLOCKS if BLOCKS[arch] == num_blocks and NUM_FEATURES[arch] == num_features]
        if not archs or "layer1.0.conv3.weight" in weights or "conv1.weight" not in weights:
            raise CheckpointError(
                f"these weights do not belong to any of {', '.join(BLOCKS)}",
                remedy=_OTHER,
            )
        large = weights["conv1.weight"].shape[-1] == 7
        stem = "imagenet" if large else ("cifar" if self.stem == "imagenet" else self.stem)
        return Header(arch=archs[0], stem=stem, num_classes=len(weights["fc.weight"]))

    def __str__(self) -> str:
        return f"{self.arch} with the {self.stem} stem and {self.num_classes} classes"


def holds_weights_alone(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a file holds a network's `state_dict()` and nothing else, as those of torchvision do."""
    return bool(checkpoint) and all(isinstance(value, Tensor) for value in checkpoint.values())


def load_weights(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """`network.load_state_dict`; a classifier with another number of classes is left out."""
    own = network.state_dict()
    fitting = copy(weights)  # keeps torch's metadata: files of its first releases lack some buffers
    num_classes = len(weights["fc.weight"])
    if num_classes != len(own["fc.weight"]):
        rank_zero_info(f"the classifier in the checkpoint has {num_classes} classes: a new classifier is trained")
        fitting |= {name: own[name] for name in ("fc.weight", "fc.bias")}
    try:
        network.load_state_dict(fitting)
    except RuntimeError as error:
        raise CheckpointError(
            f"these weights do not fit: {' '.join(str(error).split())[:300]}",
            remedy=_OTHER,
        ) from error


def read_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Open a checkpoint with `weights_only=True`, on the CPU.

    Args:
        path: The file.
        mmap: Whether its tensors stay on disk until they are used; the file must not change meanwhile.

    Raises:
        CheckpointError: There is no such file, or torch cannot read it as tensors and primitives.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # such a file is refused
        return read_own_checkpoint(path, mmap=mmap)


def read_own_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """`read_checkpoint` for a file that this process has written; it may be called in any thread.

    Suppressing a warning, as `read_checkpoint` does for other files, would affect all threads.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}", remedy="look under RUN_FOLDER/checkpoints/")
    try:
        # torch cannot map files of its old format, such as torchvision's first ones.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and _is_archive(path))
    except Exception as error:  # torch raises half a dozen types here, depending on what is broken
        raise CheckpointError(
            f"{path} is not a readable checkpoint: {_reason(error, path)}",
            remedy="use another of the run's checkpoints; only files of tensors and primitives are read",
        ) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"{path} is not a checkpoint: it holds a {type(checkpoint).__name__}", remedy="pass another"
        )
    return checkpoint


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _reason(error: Exception, path: Path) -> str:
    """The error message of torch in a line, without its advice to trust the file."""
    message = str(error)
    code = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", message)
    if code:
        return f"it needs the code of {code[1]}"
    if isinstance(error, OSError):
        return error.strerror or message
    if not path.stat().st_size:
        return "it is empty"
    if not _is_archive(path):
        return "torch has not written it, or it is incomplete"
    if "central directory" in message:
        return "it is truncated"
    lines = [line.strip() for line in message.rpartition("WeightsUnpickler error:")[2].splitlines() if line.strip()]
    return lines[0][:160] if lines else type(error).__name__


def strip_prefix(state_dict: dict[str, _T]) -> dict[str, _T]:
    """Keys of the LightningModule to those of the plain network."""
    return {key.removeprefix(_PREFIX): value for key, value in state_dict.items()}


def add_prefix(state_dict: dict[str, _T]) -> dict[str, _T]:
    """Keys of the plain network to those of the LightningModule."""
    return {_PREFIX + key: value for key, value in state_dict.items()}
