"""Lightning's door to checkpoint files: how its Trainer and its strategies write and read them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lit_cifar.checkpoint_files import carries_hash, verify_checkpoint, what_is_left, write_checkpoint
from lit_cifar.checkpoints import read_checkpoint
from lit_cifar.errors import CheckpointError, ConfigError, SaveError


class CheckpointFiles(CheckpointIO):
    """Writes files as `write_checkpoint` does, and reads tensors and primitives alone.

    Pass it to the Trainer: `plugins=[CheckpointFiles()]`. Lightning's own `TorchCheckpointIO` goes on in silence where
    it has no right to write, and leaves `weights_only` to an environment variable.

    Attributes:
        failure: Why the latest save under `deferring` failed; None if it did not.
    """

    def __init__(self) -> None:
        self.failure: CheckpointError | None = None
        self._deferring = False
        self._folders: set[Path] = set()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Remember a failure instead of raising it, for who then tells the other processes.

        Lightning calls `save_checkpoint` on rank 0 alone, and all ranks meet at a barrier after it. An exception would
        leave the others waiting there.
        """
        self.failure, self._deferring = None, True
        try:
            yield
        finally:
            self._deferring = False

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """As `write_checkpoint`; a folder is made for the first save into it, and missed if it vanishes later."""
        path = Path(path)
        try:
            write_checkpoint(checkpoint, path, make_folder=path.parent not in self._folders)
            self._folders.add(path.parent)
        except Exception as error:  # whatever it is: one silent process makes all others wait
            if not self._deferring:
                raise
            self.failure = error if isinstance(error, CheckpointError) else _unforeseen(error, path)

    @override
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Tensors on the CPU and primitives; a file that carries a hash must have it.

        Raises:
            CheckpointError: The file is missing, damaged, or holds more than that.
            ConfigError: `weights_only` is False.
        """
        if weights_only is False:
            raise ConfigError(
                "--weights_only=false would let a checkpoint run code", remedy="leave it out: no checkpoint needs it"
            )
        path = Path(path)
        if path.is_file() and carries_hash(path):
            verify_checkpoint(path)
        return read_checkpoint(path, mmap=False)

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file; one that cannot be removed stays, with a warning."""
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            rank_zero_warn(f"{path} could not be removed: {error.strerror}")


def _unforeseen(error: Exception, path: Path) -> SaveError:
    return SaveError(
        f"{path} could not be saved: {type(error).__name__}: {error}\n{what_is_left(path.parent)}"[:500],
        remedy="put nothing but tensors and primitives into a checkpoint, in `on_save_checkpoint` and `state_dict`",
    )
