"""What a user sets about the augmentation of training images, and about pictures of their own."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lit_cifar.data.augment import Augmentation
from lit_cifar.data.policies import Policy, PolicyName
from lit_cifar.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What training images go through, in this order.

    Args:
        padding: Pixels that are added on each side before a window of the image's size is cropped at random.
        reflect: Let the added pixels mirror those inside. With false they are black.
        alternate_flips: Half of the images are mirrored left to right. Mirror a random half in the first epoch and the
            other half in the second, and so on (Jordan, 2024, https://arxiv.org/abs/2404.00498). With false each epoch
            draws a new half.
        policy: "trivial_augment_wide" (one random operation of random strength) or "rand_augment".
        num_ops: Number of random operations on each image, of "rand_augment".
        magnitude: Strength of these operations, from 0 to 30.
        jitter: Brightness, contrast and saturation are multiplied, in random order, by random factors from 1 - `jitter`
            to 1 + `jitter`. At most 1.
        hue: Share of the colour circle by which the hue is shifted at most, in either direction. At most 0.5.
        erasing: Probability of a random black rectangle of 2 to 33 % of the image.
        cutout: Side of a random black square, in pixels. With 0 there is none.
        small_epochs: Number of first epochs in which images are resized to `small_size` after all else. At 24 pixels in
            place of 32 a convolution takes 9/16 of the operations.
        small_size: Height and width of training images in these epochs, in pixels.
    """

    padding: int = 4
    reflect: bool = False
    alternate_flips: bool = False
    policy: PolicyName | None = None
    num_ops: int = 2
    magnitude: int = 9
    jitter: float = 0.0
    hue: float = 0.0
    erasing: float = 0.0
    cutout: int = 0
    small_epochs: int = 0
    small_size: int = 0

    def of_images(self, size: int, *, decoded_size: int | None, seed: int) -> Augmentation:
        """The augmentation of images of `size` x `size` pixels, windows of `decoded_size` x `decoded_size` if given."""
        self._check(size, decoded_size=decoded_size)
        return Augmentation(
            seed=seed,
            resized_to=None if decoded_size is None else size,
            padding=self.padding,
            reflect=self.reflect,
            alternate=self.alternate_flips,
            policy=Policy(
                name=self.policy,
                num_ops=self.num_ops,
                magnitude=self.magnitude,
                jitter=self.jitter,
                hue=self.hue,
                erasing=self.erasing,
            ),
            cutout=self.cutout,
            small_epochs=self.small_epochs,
            small_size=self.small_size,
        )

    def _check(self, size: int, *, decoded_size: int | None) -> None:
        if self.policy != "rand_augment" and (changed := _changed(self, "num_ops", "magnitude")):
            raise ConfigError(
                f"--data.augment.{changed[0]}={changed[1]} is a setting of RandAugment",
                remedy="add --data.augment.policy=rand_augment, or leave it out",
            )
        if decoded_size is not None and (changed := _changed(self, "padding", "reflect")):
            raise ConfigError(
                "--data.pictures.decoded_size crops images that are not padded",
                remedy=f"leave out --data.augment.{changed[0]}",
            )
        if bool(self.small_epochs) != bool(self.small_size):
            raise ConfigError(
                f"--data.augment.small_epochs={self.small_epochs} and --data.augment.small_size={self.small_size} "
                "belong together",
                remedy="pass both, e.g. --data.augment.small_epochs=7 --data.augment.small_size=24, or leave both out",
            )
        if self.small_size >= size:
            raise ConfigError(
                f"--data.augment.small_size={self.small_size} is not smaller than the images, which have {size} pixels",
                remedy=f"pass --data.augment.small_size={max(1, 3 * size // 4)}",
            )
        if self.reflect and self.padding >= size:
            problem = "--data.augment.reflect=true has too few pixels to mirror"
            raise ConfigError(problem, remedy="lower --data.augment.padding")


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """How pictures of one's own are read.

    Args:
        decoded_size: Height and width of the squares that they are decoded to, in pixels. Training images are then
            windows of random size and place, and other images the centre, of the size --data.image_size. The default is
            that size, without windows. ImageNet's recipe has an image size of 224 and 256 here.
        decode: When they are decoded: "once", into a file that takes 3 bytes for each pixel, or "as_needed", by worker
            processes, in each epoch anew. All else is the same.
        num_workers: Number of worker processes for each process that trains. With 0 it decodes itself. The default is
            its share of the cores.
        cache_dir: Folder for pictures that are decoded once. The default is lit_cifar in the user's cache folder.
        cache_limit_gb: Largest size of that folder in GB.
        skip_unreadable: Leave out pictures that cannot be read. With false they are an error.
    """

    decoded_size: int | None = None
    decode: Literal["once", "as_needed"] = "once"
    num_workers: int | None = None
    cache_dir: str | Path | None = None
    cache_limit_gb: float = 100.0
    skip_unreadable: bool = False

    def check(self, image_size: int) -> None:
        """Refuse settings that contradict each other, or images of `image_size` pixels."""
        size = self.decoded_size
        if size is not None and not image_size <= size <= 2 * image_size:
            raise ConfigError(
                f"--data.pictures.decoded_size={size} is not between --data.image_size={image_size} and twice that",
                remedy=f"pass --data.pictures.decoded_size={image_size * 8 // 7}, or leave it out",
            )
        of_file = ("cache_dir", "cache_limit_gb", "skip_unreadable")
        unused, other = (("num_workers",), "as_needed") if self.decode == "once" else (of_file, "once")
        if changed := _changed(self, *unused):
            problem = f"--data.pictures.{changed[0]}={changed[1]} is not for --data.pictures.decode={self.decode}"
            raise ConfigError(problem, remedy=f"leave it out, or pass --data.pictures.decode={other}")

    def refuse(self) -> None:
        """Refuse what is set, as the data set has no such pictures."""
        if changed := _changed(self, *(field.name for field in fields(self))):
            problem = f"--data.pictures.{changed[0]}={changed[1]} is for pictures of your own, which are decoded"
            raise ConfigError(problem, remedy="leave it out, or pass --data.dataset=folder")


def _changed(options: Augment | Pictures, *names: str) -> tuple[str, Any] | None:
    """The first of the settings `names` that is not the default, and its value."""
    given, usual = vars(options), vars(type(options)())
    return next(((name, given[name]) for name in names if given[name] != usual[name]), None)


# The arguments of the data module that are groups of settings.
GROUPS: dict[str, type[Augment | Pictures]] = {"augment": Augment, "pictures": Pictures}
