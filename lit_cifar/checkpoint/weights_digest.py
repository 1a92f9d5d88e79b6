"""`weights.sha256` in the run folder: a line for each epoch, by which two runs can be compared by eye."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_cifar.checkpoint.format import POSITION

FILE = "weights.sha256"


def digest(weights: Mapping[str, Tensor]) -> str:
    """The SHA-256 of parameters and buffers, in hexadecimal: of their names, dtypes, shapes and bytes by name."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def note_epoch(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """If `checkpoint` is of an epoch's end, write its line, in place of those of this epoch and of later ones."""
    position = checkpoint.get(POSITION, {"epoch": 0})
    if not position["epoch"] or position["step"]:
        return
    path, epoch = folder / FILE, position["epoch"] - 1
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if int(line.rpartition(" ")[2]) < epoch]
    draft = path.with_name(FILE + ".part")
    draft.write_text("\n".join([*kept, f"{digest(checkpoint['state_dict'])}  epoch {epoch}", ""]))
    draft.replace(path)
