"""`weights.sha256` in the run folder: a line for each epoch, by which two runs can be compared by eye."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_cifar.checkpoint.format import POSITION
from lit_cifar.checkpoint.save_errors import save_error
from lit_cifar.reporting.synced_files import replacing

FILE = "weights.sha256"
_LINE = re.compile(r"[0-9a-f]{64}  epoch (\d+)")


def digest(weights: Mapping[str, Tensor]) -> str:
    """The SHA-256 of parameters and buffers, in hexadecimal: of their names, dtypes, shapes and bytes by name."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def note_epoch(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """If `checkpoint` is of an epoch's end, write its line, in place of those of this epoch and of later ones.

    To be called before the checkpoint is written: a run that is killed in between repeats the epoch and its line.

    Raises:
        SaveError: The file cannot be written.
    """
    position = checkpoint.get(POSITION, {"epoch": 0})
    if not position["epoch"] or position["step"]:
        return
    path, epoch = folder / FILE, position["epoch"] - 1
    try:
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if (found := _LINE.fullmatch(line)) and int(found[1]) < epoch]
        with replacing(path) as file:
            file.write("\n".join([*kept, f"{digest(checkpoint['state_dict'])}  epoch {epoch}", ""]))
    except OSError as error:
        raise save_error(error, path, checkpoints=folder / "checkpoints") from error
