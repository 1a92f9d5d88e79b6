"""Terminal output of a run: our own lines, results and warnings, without Lightning's banners.

A run describes itself in `lit_cifar.reporting.run_report`. Lightning's messages of level INFO repeat that in different
words, or repeat the user's input. Those of callbacks, loggers and profilers that a user has added are shown.
"""

import errno
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning

from lit_cifar.errors import printable

# Warnings of Lightning and torch that appear in every run, or in every run of a mode, and that no user can act on.
_NOISE = (
    r".*LeafSpec.* is deprecated",  # Lightning's own use of torch's pytree, from torch 2.15 on
    r"torch.distributed.nn.functional.all_gather is deprecated",  # Lightning calls it in Strategy.all_gather
    r"barrier\(\): using the device under current context",  # it is right; torch cannot know `ddp_mp`'s other ones
    r"Total length of `list` across ranks is zero",  # --data.val_size=0 is meant
    r"Checkpoint directory .* exists and is not empty",  # a run is resumed; a new one begins in an empty folder
    r"Detected call of `lr_scheduler.step\(\)` before",  # 16-mixed leaves out steps until its scale fits
    r"You passed .* AMP with fp16 is not supported on CPU",  # the command line refuses it
    r"Glyph \d+ .* missing from",  # a class name in letters that matplotlib's font lacks is drawn in boxes
    r"The dirpath has changed from",  # a test writes to a folder of its own, and ranks no checkpoints
    r"You requested to overfit but enabled (train|val) dataloader shuffling",  # of loaders that are not torch's
    r"GPU available but not used",  # --trainer.accelerator=cpu is meant
    r"The `srun` command is available .* but is not used",  # every run on a login node of SLURM
    r"The number of training batches .* is smaller than the logging interval",  # every epoch is logged at its end
)
_CHOSEN = ("callbacks", "loggers", "profilers")  # Lightning's folders of classes that a user adds by name
_LIGHTNING, _PACKAGE = Path(lightning.__file__).parent, Path(__file__).parents[1]
_ANY_CALLER = "lightning.pytorch.utilities.rank_zero"  # the logger that `rank_zero_info` writes to, also from our code
_LEVELS = {
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
    _ANY_CALLER: logging.INFO,
    **{f"lightning.pytorch.{folder}": logging.INFO for folder in _CHOSEN},
}


def leave_out_banners() -> None:
    """Set this process's Lightning loggers, warning filters and forms of warnings and threads' errors, for good."""
    form, show = warnings.formatwarning, threading.excepthook
    threading.excepthook = lambda args: None if _is_raised_again(args) else show(args)
    warnings.formatwarning = lambda *args, **kwargs: _own_form(*args) or form(*args, **kwargs)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    # Lightning's CLI calls functions of which jsonargparse announces the end; PYTHONWARNINGS=error would end the run.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"lightning\.pytorch\.cli$")
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger(_ANY_CALLER).addFilter(_is_no_banner)


@contextmanager
def without_banners() -> Iterator[None]:
    """Leave out the banners, and put loggers, warnings and threads' errors back at the end."""
    levels = {name: logging.getLogger(name).level for name in _LEVELS}
    form, show = warnings.formatwarning, threading.excepthook
    with warnings.catch_warnings():
        leave_out_banners()
        try:
            yield
        finally:
            warnings.formatwarning, threading.excepthook = form, show
            logging.getLogger(_ANY_CALLER).removeFilter(_is_no_banner)
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _own_form(message: Warning | str, category: type[Warning], filename: str, *_: Any) -> str | None:
    """A warning of ours in a line, without the code that warns; None for any other warning."""
    is_ours = category is UserWarning and Path(filename).is_relative_to(_PACKAGE)
    return f"lit_cifar: warning: {printable(str(message), lines=True)}\n" if is_ours else None


def _is_raised_again(args: threading.ExceptHookArgs) -> bool:
    """Whether a thread's error is one that the main thread raises too: TensorBoard's writer meets a full disk first."""
    return isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")


def _is_no_banner(record: logging.LogRecord) -> bool:
    """Whether a message comes from our code, from a class that the user has added, or is more than information."""
    path = Path(record.pathname)
    if record.levelno > logging.INFO or not path.is_relative_to(_LIGHTNING):
        return True
    return any(folder in path.relative_to(_LIGHTNING).parts for folder in _CHOSEN)


def outlast_streams() -> None:
    """Discard what this process prints to a stdout or stderr that cannot take it: the run continues.

    It may be a pipe whose reader has gone (`fit | head -1`), a terminal that was closed or a full disk.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Outlasting):
            setattr(sys, name, _Outlasting(stream, name=name))


class _Outlasting:
    """A text stream that does not fail when `stream` does; everything else is the stream's own."""

    def __init__(self, stream: Any, *, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._discard(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        """Discard output from now on, also of processes that this one will start, and of Python's flush at its end."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        if error.errno != errno.EPIPE:  # EPIPE: the reader has stopped reading, and knows it
            print(f"lit_cifar: what {self._name} shows ends here: {error}", file=sys.stderr)
