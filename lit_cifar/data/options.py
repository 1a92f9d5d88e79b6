"""What a user sets about pictures of their own."""

from dataclasses import dataclass

from lit_cifar.errors import ConfigError, bounded


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
        """Refuse all settings that are not the default."""
        for name, value in vars(self).items():
            if value != getattr(Pictures, name):
                problem = f"--data.pictures.{name}={value} is for pictures of your own, which are decoded"
                raise ConfigError(problem, remedy="leave it out, or pass --data.dataset=folder")
