"""The state of another process on the same machine."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import psutil  # type: ignore[import-untyped]

# Fields of /proc/PID/stat after the command's name: proc_pid_stat(5), from field 3 on.
_STATE, _START_TIME, _EXIT_CODE = 0, 19, 49


class Sight(NamedTuple):
    """The observed state of a process."""

    # "unseen" for a process that cannot be observed from here, as on another machine.
    state: Literal["running", "stopped", "gone", "unseen"]
    ending: str = ""  # how the process ended, e.g. "SIGKILL", if that is known


def start_time(pid: int) -> str:
    """When the process was started, in the kernel's units; "" without /proc, or if there is no such process.

    Together with the pid it identifies a process: pids are reused.
    """
    fields = _stat(pid)
    return fields[_START_TIME] if fields else ""


def look_at(pid: int, started: str) -> Sight:
    if not started:
        return Sight("running" if psutil.pid_exists(pid) else "gone")
    fields = _stat(pid)
    if not fields or fields[_START_TIME] != started:
        return Sight("gone")
    if fields[_STATE] in "ZX":
        status = int(fields[_EXIT_CODE])  # 0 also if this user may not read it
        return Sight("gone", ending(os.waitstatus_to_exitcode(status)) if status else "")
    return Sight("stopped" if fields[_STATE] == "T" else "running")


def ending(exit_code: int) -> str:
    """In words; `exit_code` as of `subprocess.Popen`: a signal's number is negative."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def kill(pid: int, started: str) -> None:
    """Kill another process, if it is still the one that was started at `started`."""
    if pid != os.getpid() and look_at(pid, started).state != "gone":
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the command's name before it may contain any character
