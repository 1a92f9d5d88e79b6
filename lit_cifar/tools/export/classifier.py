"""What is exported: the network of a checkpoint, from an image's bytes to logits, and the images to compare it on."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_cifar.checkpoint.files import verify_checkpoint
from lit_cifar.checkpoint.format import Header, holds_weights_alone, naming, read_checkpoint
from lit_cifar.checkpoint.sample_audit.digest import Receipt
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.class_folders import OwnPictures
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.errors import CheckpointError, ConfigError, DataError
from lit_cifar.task.module import LitResNet

NUM_IMAGES = 100
_CONFIG = "--config RUN_FOLDER/config.yaml"


class Classifier(nn.Module):
    """A network with the normalisation of its data set before it.

    Args:
        network: From normalised images to logits.
        mean: Of each channel, in units of the full range, 0 to 1.
        std: The standard deviation likewise.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, *, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", 255 * torch.tensor(mean)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(std)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float32 (n, num_classes), of images, uint8 (n, 3, height, width)."""
        logits: Tensor = self.network((images.to(torch.float32) - self.mean) / self.std)
        return logits


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A checkpoint, opened.

    Attributes:
        module: Its network, on the CPU, in evaluation mode.
        data: The data set that it was trained on, not read yet.
    """

    module: LitResNet
    data: CIFAR10DataModule

    def classifier(self) -> Classifier:
        """What is exported."""
        source = self.data.source
        return Classifier(self.module.network, mean=source.mean, std=source.std).eval().requires_grad_(False)

    @torch.no_grad()
    def logits(self, images: ImageSet) -> Tensor:
        """As the module computes them in `test`, with the data module's own normalisation."""
        ids = torch.arange(len(images))
        batch = self.data.on_after_batch_transfer(Batch(images.images, images.labels, ids, 1.0), 0)
        logits: Tensor = self.module(batch.images)
        return logits

    def images(self) -> ImageSet:
        """The first test images, at most `NUM_IMAGES`; of own pictures without a folder `test` those to train on.

        Raises:
            DataError: They are not there, or damaged.
        """
        source = self.data.source
        has_test = not isinstance(source, OwnPictures) or (source.root / "test").is_dir()
        with _naming_the_folder():
            try:
                return source.load("test" if has_test else "train", num_images=NUM_IMAGES)
            except DataError:
                raise
            except ConfigError:  # there are fewer
                return source.load("test" if has_test else "train")


def open_checkpoint(path: Path, *, network: nn.Module | None, dataset: str | None, root: str | Path) -> Trained:
    """Read a checkpoint whose hash is right.

    Args:
        path: A file that `fit` wrote.
        network: The user's own; None for one of this package's.
        dataset: Name of the data set; None for the one that the checkpoint names.
        root: Its folder.

    Raises:
        CheckpointError: The file is missing, damaged or not of `fit`, or holds another network or other classes.
        DataError: The classes are folders, and there are none.
    """
    content = _verified(path)
    with naming(path):
        header, receipt = Header.of(content), Receipt.read(content)
    if header.network is not None and network is None:
        own = shlex.quote(f"--model.network={header.network}")
        raise CheckpointError(
            f"{path} holds {header}, and no code is run because a checkpoint names it",
            remedy=f"pass --config RUN_FOLDER/config.yaml, or {own}",
        )
    trained_on = dataset if receipt is None else str(receipt.settings["dataset"])
    if trained_on is None:
        raise CheckpointError(f"{path} does not say which data it was trained on", remedy=f"pass {_CONFIG}")
    with _naming_the_folder():
        name = dataset or trained_on.partition(" ")[0]
        data = CIFAR10DataModule(root, dataset=name, image_size=header.image_size)
    if receipt is not None and trained_on != data.dataset:
        raise CheckpointError(
            f"{path} was trained on {trained_on}, not on {data.dataset}: classes and normalisation differ",
            remedy=f"pass {_CONFIG}, and --data.root=FOLDER if the data have been moved",
        )
    arguments: dict[str, Any] = {} if network is None else {"network": network}
    with naming(path):
        module = LitResNet.load_from_checkpoint(path, map_location="cpu", weights_only=True, **arguments)
    return Trained(module=module.eval(), data=data)


@contextmanager
def _naming_the_folder() -> Iterator[None]:
    """Nothing is downloaded or drawn in place of what is not there, as other commands can be asked to."""
    try:
        yield
    except DataError as error:
        raise DataError(
            error.problem,
            remedy=f"put it right, or pass --data.root=FOLDER with the data of the training, or {_CONFIG}",
        ) from error


def _verified(path: Path) -> dict[str, Any]:
    """The content of a checkpoint that is whole and unchanged since it was written."""
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(
            error.problem, remedy="export another of the run's checkpoints, e.g. RUN_FOLDER/checkpoints/best.ckpt"
        ) from error
    content = read_checkpoint(path)
    if holds_weights_alone(content):
        raise CheckpointError(
            f"{path} holds weights alone, and not on which data they were trained",
            remedy="export a checkpoint of `python -m lit_cifar fit`",
        )
    return content
