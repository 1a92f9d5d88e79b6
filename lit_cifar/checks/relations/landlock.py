"""What this process and all that it starts may write to, guarded by Linux: in C and in other programs too.

See https://docs.kernel.org/userspace-api/landlock.html. Without it, as before Linux 6.2, nothing is guarded.
"""

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from ctypes import CDLL, byref, c_int, c_size_t, c_uint64
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # numbers of system calls, the same on all processors
_VERSION, _BENEATH = 1, 1
_LEAST = 3  # version that knows of truncating
_PR_SET_NO_NEW_PRIVS = 38
_WRITES = sum(1 << bit for bit in (1, *range(4, 15)))  # to write, remove, make, move and truncate; not to read


def is_there() -> bool:
    return int(CDLL(None).syscall(_CREATE_RULESET, None, c_size_t(0), _VERSION)) >= _LEAST


def write_only_below(folders: Iterable[Path]) -> None:
    """Let this thread, and threads and processes that it starts from now on, write nowhere else."""
    if not is_there():
        return
    system = CDLL(None)
    rules = system.syscall(_CREATE_RULESET, byref(c_uint64(_WRITES)), c_size_t(8), 0)
    for folder in folders:
        with suppress(OSError):  # it is not there
            place = os.open(folder, os.O_PATH)
            system.syscall(_ADD_RULE, c_int(rules), _BENEATH, struct.pack("=Qi", _WRITES, place), 0)
            os.close(place)
    system.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    system.syscall(_RESTRICT_SELF, c_int(rules), 0)
    os.close(rules)
