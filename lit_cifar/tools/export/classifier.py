"""What is exported: the network of a checkpoint, from an image's bytes to logits."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_cifar.checkpoint.files import verify_checkpoint
from lit_cifar.checkpoint.format import Header, naming, read_checkpoint
from lit_cifar.checkpoint.sample_audit import AuditRecord
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.errors import CheckpointError, DataError
from lit_cifar.task.module import LitResNet

_CONFIG = "--config RUN_FOLDER/config.yaml"


class Classifier(nn.Module):
    """A network in evaluation mode, with the normalisation of its data set before it.

    `mean` and `std` of each channel are in units of the full range, 0 to 1.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, *, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", 255 * torch.tensor(mean)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(std)[:, None, None])
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float32 (n, num_classes), of images, uint8 (n, 3, height, width)."""
        logits: Tensor = self.network((images.to(torch.float32) - self.mean) / self.std)
        return logits


def open_checkpoint(
    path: Path, *, network: nn.Module | None, dataset: str | None, root: str | Path
) -> tuple[LitResNet, CIFAR10DataModule]:
    """Read a checkpoint whose hash is right: its network, in evaluation mode, and the data set of its training.

    Args:
        path: A file that `fit` wrote.
        network: The user's own; None for one of this package's.
        dataset: Name of the data set; None for the one that the checkpoint names.
        root: Its folder, which is needed where the classes are folders.

    Raises:
        CheckpointError: The file is missing, damaged or not of `fit`, or holds another network or other classes.
        DataError: The classes are folders, and there are none.
    """
    content = _verified(path)
    with naming(path):
        header, audit = Header.of(content), AuditRecord.read(content)
    if header.network is not None and network is None:
        own = shlex.quote(f"--model.network={header.network}")
        raise CheckpointError(
            f"{path} holds {header}, and no code is run because a checkpoint names it",
            remedy=f"pass {_CONFIG}, or {own}",
        )
    trained_on = dataset if audit is None else str(audit.settings["dataset"])
    if trained_on is None:
        raise CheckpointError(f"{path} does not say which data it was trained on", remedy=f"pass {_CONFIG}")
    try:
        name = dataset or trained_on.partition(" ")[0]
        data = CIFAR10DataModule(root, dataset=name, image_size=header.image_size)
    except DataError as error:
        remedy = f"pass --data.root=FOLDER with the data of the training, or {_CONFIG}"
        raise DataError(error.problem, remedy=remedy) from error
    if audit is not None and trained_on != data.dataset:
        raise CheckpointError(
            f"{path} was trained on {trained_on}, not on {data.dataset}: classes and normalisation differ",
            remedy=f"pass {_CONFIG}, and --data.root=FOLDER if the data have been moved",
        )
    arguments: dict[str, Any] = {} if network is None else {"network": network}
    with naming(path):
        module = LitResNet.load_from_checkpoint(path, map_location="cpu", weights_only=True, **arguments)
    return module.eval(), data


def _verified(path: Path) -> dict[str, Any]:
    """The content of a checkpoint that is whole and unchanged since it was written."""
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        remedy = "export another of the run's checkpoints, e.g. RUN_FOLDER/checkpoints/best.ckpt"
        raise CheckpointError(error.problem, remedy=remedy) from error
    return read_checkpoint(path)
