"""What a checkpoint holds beside Lightning's own entries, and how one is opened: never by running code from it."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from lit_cifar.errors import CheckpointError

_KEY = "lit_cifar"
_PREFIX = "network."
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Header:
    """Which network a checkpoint belongs to; its fields are `build_resnet`'s arguments."""

    arch: str
    stem: str
    num_classes: int

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Put the header into `checkpoint`."""
        checkpoint[_KEY] = asdict(self)

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Compare with the header of `checkpoint`.

        Raises:
            CheckpointError: There is none, or it names another network.
        """
        found = checkpoint.get(_KEY)
        if not isinstance(found, dict) or found.keys() != asdict(self).keys():
            raise CheckpointError(
                "this checkpoint has no lit_cifar header that says which network it holds",
                remedy="pass one that `python -m lit_cifar fit` wrote",
            )
        if found != asdict(self):
            flags = " ".join(f"--model.{name}={value}" for name, value in found.items())
            raise CheckpointError(
                f"the checkpoint holds {_describe(found)}, the model is {_describe(asdict(self))}",
                remedy=f"to use this checkpoint pass {flags}",
            )


def read_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Open a checkpoint with `weights_only=True`, on the CPU.

    Args:
        path: The file.
        mmap: Whether its tensors stay on disk until they are used; the file must then stay as it is.

    Raises:
        CheckpointError: No such file, or not one that torch can read as tensors and primitives.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}", remedy="look under RUN_FOLDER/checkpoints/")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises half a dozen types here, by what is broken
        raise CheckpointError(
            f"{path} is not a readable checkpoint: {_reason(error)}",
            remedy="use another one of the run's checkpoints; files that need more than tensors are refused",
        ) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} holds no checkpoint but a {type(checkpoint).__name__}", remedy="pass another")
    return checkpoint


def _reason(error: Exception) -> str:
    """Torch's complaint in a line, without its advice to trust the file."""
    message = str(error)
    code = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", message)
    if code:
        return f"it needs the code of {code[1]}"
    lines = [line.strip() for line in message.rpartition("WeightsUnpickler error:")[2].splitlines() if line.strip()]
    return lines[0][:160] if lines else type(error).__name__


def strip_prefix(state_dict: dict[str, _T]) -> dict[str, _T]:
    """Keys of the LightningModule to those of the plain network."""
    return {key.removeprefix(_PREFIX): value for key, value in state_dict.items()}


def add_prefix(state_dict: dict[str, _T]) -> dict[str, _T]:
    """Keys of the plain network to those of the LightningModule."""
    return {_PREFIX + key: value for key, value in state_dict.items()}


def _describe(header: dict[str, Any]) -> str:
    return f"{header['arch']} with the {header['stem']} stem and {header['num_classes']} classes"
