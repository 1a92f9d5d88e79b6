"""The heartbeat that a process sends once a second, and what other processes on its machine see of it."""

import json
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from lit_cifar.checks.watchdog.activity import FIRST_TIME_S
from lit_cifar.checks.watchdog.stacks import leave_traces, read_trace, request, trace_file
from lit_cifar.launch.signals import ending

# Fields of /proc/PID/stat after the command's name: proc_pid_stat(5), from field 3 on.
_STATE, _START_TIME, _EXIT_CODE = 0, 19, 49


class Sight(NamedTuple):
    # "unseen" for a process that cannot be observed from here, such as on a different machine, or that runs in another
    # network: that it runs does not tell whether it can be reached.
    state: Literal["running", "stopped", "gone", "unseen"]
    ending: str = ""  # the end of the process, such as "SIGKILL", if that is known
    trace: str = ""  # the lines of Python that the process was in, if it has left them


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


def kill(pid: int, started: str, *, ranks: Collection[int] = ()) -> None:
    """Kill another process, if it is still the one that was started at `started`, and those that it has forked.

    A worker of a data loader that hangs would stay. Other `ranks`, which may be forked too, end by themselves.
    """
    if pid != os.getpid() and look_at(pid, started).state != "gone":
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            words, children = process.cmdline(), process.children()
            process.kill()
            for child in children:
                with suppress(psutil.Error):
                    if child.cmdline() == words and child.pid not in ranks:
                        child.kill()


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the command's name before it may contain any character


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    rank: int
    pid: int
    started: str  # the result of `start_time`
    host: str
    network: str = ""  # the process's network namespace
    trace_file: int = -1  # descriptor of its trace file, see `stacks.trace_file`
    number: int = 0  # number of the heartbeat, from 0
    phase: str = "starting"
    step: int = 0  # optimizer steps that are done
    events: int = 0  # number of phases that the main thread has begun
    idle_s: float = 0.0  # seconds since this phase began
    expected_s: float = 0.0  # seconds that this phase may take, going by its earlier durations
    place: str = ""  # collective operation and line of Python of a main thread that has been idle for some time
    stack: str = ""  # innermost frames of that thread, outermost first
    waits: bool = False  # whether that thread waited for other processes, see `Activity`
    works: bool = False  # whether that thread computed, or used a disk
    failure: str = ""  # the end of the traceback with which the main thread failed, or ""
    quiet: bool = False  # whether the process itself prints the message about its failure
    order: int = 0  # number of failures when this one was reported, itself included; 0 without one
    asked: int = 0  # the number of a signal by which it was asked to stop
    over: bool = False  # whether the main thread has finished and need not be watched any more
    seen: dict[int, Sight] = field(default_factory=dict)  # states of other ranks on its machine
    verdict: tuple[Any, ...] = ()  # fields of the `Verdict` of rank 0, the judge, once there is one

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Heartbeat":
        fields = json.loads(text)
        seen = {int(rank): Sight(*sight) for rank, sight in fields.pop("seen").items()}
        return cls(seen=seen, verdict=tuple(fields.pop("verdict")), **fields)


def first_heartbeat(rank: int) -> Heartbeat:
    pid = os.getpid()
    leave_traces(trace_file(pid))
    return Heartbeat(
        rank=rank,
        pid=pid,
        started=start_time(pid),
        host=socket.gethostname(),
        network=_network(),
        trace_file=trace_file(pid),
        expected_s=FIRST_TIME_S,
    )


def _network() -> str:
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


class Mates:
    """The other ranks on this machine, except those in another container, which cannot be seen from here."""

    def __init__(self, everyone: Collection[Heartbeat], own: Heartbeat) -> None:
        self._pids = {beat.pid for beat in everyone}
        self._network = own.network
        others = [beat for beat in everyone if beat.host == own.host and beat.rank != own.rank]
        # A process that has sent a heartbeat and is not found is in another container.
        self._beats = {beat.rank: beat for beat in others if look_at(beat.pid, beat.started).state != "gone"}
        self._gone: dict[int, Sight] = {}
        self._traces: dict[int, int] = {}  # trace files, open so that they can be read after the processes' ends
        for rank, beat in self._beats.items():
            with suppress(OSError):  # the process may be another user's
                self._traces[rank] = os.open(f"/proc/{beat.pid}/fd/{beat.trace_file}", os.O_RDONLY)

    def look(self) -> dict[int, Sight]:
        sights = {}
        for rank, beat in self._beats.items():
            if rank not in self._gone:
                sight = look_at(beat.pid, beat.started)
                if sight.state == "running" and beat.network != self._network:
                    sight = Sight("unseen")
                sights[rank] = sight._replace(trace=read_trace(self._traces[rank])) if rank in self._traces else sight
        self._gone |= {rank: sight for rank, sight in sights.items() if sight.state == "gone"}
        return sights | self._gone

    def ask(self, rank: int) -> None:
        """Ask a rank that does not answer to leave a trace."""
        if rank in self._traces:
            request(self._beats[rank].pid, self._beats[rank].trace_file)

    def close(self) -> None:
        while self._traces:
            os.close(self._traces.popitem()[1])

    def kill(self, rank: int) -> None:
        """Kill a rank, if it is one of these and still there."""
        if rank in self._beats:
            kill(self._beats[rank].pid, self._beats[rank].started, ranks=self._pids)
