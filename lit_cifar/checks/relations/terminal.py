"""The terminal of a run: it has a size, and nobody types into it."""

import os
import sys
import termios
from contextlib import suppress
from typing import Any

from lit_cifar.checks.relations.patching import before, patched
from lit_cifar.checks.relations.plan import End

_SIZE = (24, 80)  # lines and columns


def give_terminal(end: End) -> None:
    """Let the standard input be a terminal that is at its end, whose size is that of the other streams too."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with suppress(OSError):  # where a machine has no pseudo-terminals
        _, inside = os.openpty()  # the other side stays open with this process
        termios.tcsetwinsize(inside, _SIZE)
        settings = termios.tcgetattr(inside)
        settings[3] &= ~(termios.ICANON | termios.ECHO)
        settings[6][termios.VMIN] = settings[6][termios.VTIME] = 0  # a reader does not wait
        termios.tcsetattr(inside, termios.TCSANOW, settings)
        os.dup2(inside, 0)

    sys.stdin = os.fdopen(0, closefd=False)
    patched(sys.stdin, "readline", before(lambda *_: setattr(end, "asks", True)))  # which `input` calls too
    patched(os, "get_terminal_size", _size)


def _size(own: Any, *args: Any) -> Any:
    with suppress(OSError):
        return own(*args)
    return os.terminal_size(_SIZE[::-1])
