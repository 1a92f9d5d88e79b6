"""What a process tells of itself, when all meet and then once a second; and what others on its machine see of it."""

import json
import os
import signal
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Fields of /proc/PID/stat after the command's name: proc_pid_stat(5), from field 3 on.
_STATE, _START_TIME, _EXIT_CODE = 0, 19, 49


class Sight(NamedTuple):
    # "unseen" for a process that cannot be observed from here, such as on a different machine.
    state: Literal["running", "stopped", "gone", "unseen"]
    ending: str = ""  # the end of the process, such as "SIGKILL", if that is known


def start_time(pid: int) -> str:
    """Time at which the process was started, in the kernel's units; "" if there is no such process.

    Together with the pid it identifies a process: pids are reused.
    """
    fields = _stat(pid)
    return fields[_START_TIME] if fields else ""


def look_at(pid: int, started: str) -> Sight:
    fields = _stat(pid)
    if not fields or fields[_START_TIME] != started:
        return Sight("gone")
    if fields[_STATE] in "ZX":
        status = int(fields[_EXIT_CODE])  # also 0 if this user may not read it
        return Sight("gone", ending(os.waitstatus_to_exitcode(status)) if status else "")
    return Sight("stopped" if fields[_STATE] == "T" else "running")


def ending(exit_code: int) -> str:
    """An exit code of `subprocess.Popen` in words: a negative one is a signal's number."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _stat(pid: int) -> list[str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the command's name before it may contain any character


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    rank: int
    pid: int
    started: str  # the result of `start_time`
    host: str
    network: str = ""  # the process's network namespace
    number: int = 0  # number of the heartbeat; that with which a process presents itself when all meet has 0
    step: int = 0  # optimizer steps that are done
    place: str = ""  # line of Python at which the main thread is
    idle_s: float = 0.0  # seconds in which that thread has not got on, see `Progress`
    over: bool = False  # whether it has finished and need not be watched any more
    failure: str | None = None  # the end of the traceback with which it failed; "" if the process itself shows that
    order: int = 0  # number of failures when this one was reported, itself included; 0 without one
    seen: dict[int, Sight] = field(default_factory=dict)  # states of other ranks on its machine
    verdict: tuple[Any, ...] = ()  # fields of the `Verdict` of rank 0, the judge, once there is one

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Heartbeat":
        fields = json.loads(text)
        seen = {int(rank): Sight(*sight) for rank, sight in fields["seen"].items()}
        return cls(**fields | {"seen": seen, "verdict": tuple(fields["verdict"])})


def this_process(rank: int) -> Heartbeat:
    """The heartbeat with which this process presents itself."""
    pid, network = os.getpid(), ""
    with suppress(OSError):
        network = str(Path("/proc/self/ns/net").readlink())
    return Heartbeat(rank=rank, pid=pid, started=start_time(pid), host=socket.gethostname(), network=network)


class Mates:
    """The other ranks on this machine, except those in another container or network.

    These cannot be seen from here, or are seen to run though they cannot be reached.
    """

    def __init__(self, everyone: Collection[Heartbeat], own: Heartbeat) -> None:
        others = [each for each in everyone if each.rank != own.rank]
        near = [each for each in others if (each.host, each.network) == (own.host, own.network)]
        # A process that has met the others and is not found is in another container.
        self._known = {each.rank: each for each in near if look_at(each.pid, each.started).state != "gone"}
        self._gone: dict[int, Sight] = {}  # the first of each: how it has ended is seen for a moment only

    def look(self) -> dict[int, Sight]:
        sights = {rank: look_at(each.pid, each.started) for rank, each in self._known.items()} | self._gone
        self._gone = {rank: sight for rank, sight in sights.items() if sight.state == "gone"}
        return sights

    def kill(self, rank: int) -> None:
        """Kill a rank, if it is one of these and still there."""
        if self.look().get(rank, Sight("gone")).state != "gone":
            with suppress(OSError):
                os.kill(self._known[rank].pid, signal.SIGKILL)
