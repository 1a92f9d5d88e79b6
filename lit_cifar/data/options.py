"""What a user sets about the augmentation of training images, and about pictures of their own."""

from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from lit_cifar.data.augment import Augmentation
from lit_cifar.errors import ConfigError, bounded, clash


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What training images go through, in this order.

    Args:
        padding: Pixels that are added on each side before a window of the image's size is cropped at random.
        reflect: Let the added pixels mirror those inside. With false they are black.
        alternate_flips: Half of the images are mirrored left to right. Mirror a random half in the first epoch and the
            other half in the second, and so on (Jordan, 2024, https://arxiv.org/abs/2404.00498). With false each epoch
            draws a new half.
        transforms: Modules that then change one image, by class: those of torchvision.transforms.v2, or your own. They
            get a uint8 tensor (3, height, width) and return one.
        cutout: Side of a random black square, in pixels. With 0 there is none.
    """

    padding: int = 4
    reflect: bool = False
    alternate_flips: bool = False
    transforms: list[nn.Module] = field(default_factory=list)
    cutout: int = 0

    def of_images(self, size: int, *, decoded_size: int | None, seed: int) -> Augmentation:
        """The augmentation of images of `size` x `size` pixels, windows of `decoded_size` x `decoded_size` if given."""
        bounded("--data.augment.padding", self.padding, 0)
        bounded("--data.augment.cutout", self.cutout, 0)
        if decoded_size is not None and (changed := _changed(self, "padding", "reflect")):
            raise clash("--data.pictures.decoded_size", f"--data.augment.{changed[0]}", "its crops are not padded")
        if self.reflect and self.padding >= size:
            remedy = "lower --data.augment.padding"
            raise ConfigError("--data.augment.reflect=true has too few pixels to mirror", remedy=remedy)
        transforms = None
        if self.transforms:
            from lit_cifar.data.transforms import Transforms

            transforms = Transforms(tuple(self.transforms))
            transforms.check(size)
        resized_to = None if decoded_size is None else size
        return Augmentation(**(vars(self) | {"transforms": transforms}), seed=seed, resized_to=resized_to)


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """How pictures of one's own are read.

    Args:
        decoded_size: Height and width of the squares that they are decoded to, in pixels. Training images are then
            windows of random size and place, and other images the centre, of the size --data.image_size. The default is
            that size, without windows. ImageNet's recipe has an image size of 224 and 256 here.
        memory_gb: Largest size of the decoded pictures of a split, in GB, that each process keeps in its memory. Larger
            ones are decoded by worker processes in each epoch anew; all else is the same. The default is half of what
            the machine has free, divided among its processes that train.
        skip_unreadable: Leave out pictures that cannot be read; they are searched for at each start. With false they
            are an error.
    """

    decoded_size: int | None = None
    memory_gb: float | None = None
    skip_unreadable: bool = False

    def __post_init__(self) -> None:
        bounded("--data.pictures.memory_gb", self.memory_gb, 0)

    def check(self, image_size: int) -> None:
        """Refuse settings that contradict each other, or images of `image_size` pixels."""
        size = self.decoded_size
        if size is not None and not image_size <= size <= 2 * image_size:
            problem = f"--data.pictures.decoded_size={size} is not between --data.image_size={image_size} and twice it"
            raise ConfigError(problem, remedy=f"pass --data.pictures.decoded_size={image_size * 8 // 7}")

    def refuse(self) -> None:
        if changed := _changed(self, *(field.name for field in fields(self))):
            problem = f"--data.pictures.{changed[0]}={changed[1]} is for pictures of your own, which are decoded"
            raise ConfigError(problem, remedy="leave it out, or pass --data.dataset=folder")


def _changed(options: Augment | Pictures, *names: str) -> tuple[str, Any] | None:
    """The first of the settings `names` that is not the default, and its value."""
    given, usual = vars(options), vars(type(options)())
    return next(((name, given[name]) for name in names if given[name] != usual[name]), None)
