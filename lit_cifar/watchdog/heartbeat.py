"""The heartbeat that a process writes into the store once a second."""

import json
import os
import socket
import sys
import traceback
from dataclasses import dataclass, field
from types import FrameType

from lit_cifar.watchdog.phases import FIRST_TIME_S
from lit_cifar.watchdog.process_info import Sight, start_time

_NUM_FRAMES = 4


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A process and its progress."""

    rank: int
    pid: int
    started: str  # when the process was started, as returned by `process.start_time`; "" if unknown
    host: str
    number: int = 0  # number of the heartbeat, from 0
    phase: str = "starting"
    step: int = 0  # optimizer steps that are done
    events: int = 0  # number of phases that the main thread has begun
    idle_s: float = 0.0  # seconds since this phase began
    patience_s: float = 0.0  # seconds that this phase may take
    stack: str = ""  # the main thread's innermost frames, outermost first, once it has been idle for some time
    waits: bool = False  # whether it then waited for other processes, see `Activity`
    works: bool = False  # whether it computed, or used a disk
    failure: str = ""  # the end of the traceback with which the main thread failed, or ""
    quiet: bool = False  # whether the process itself prints the message about its failure
    order: int = 0  # number of failures when this one was reported, itself included; 0 without one
    over: bool = False  # whether the main thread has finished and need not be watched any more
    seen: dict[int, Sight] = field(default_factory=dict)  # other ranks on its machine that are stopped or gone
    verdict: str = ""  # of rank 0, the judge: its verdict as JSON, once there is one

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Heartbeat":
        fields = json.loads(text)
        seen = {int(rank): Sight(*sight) for rank, sight in fields.pop("seen").items()}
        return cls(seen=seen, **fields)


def first_heartbeat(rank: int) -> Heartbeat:
    pid = os.getpid()
    return Heartbeat(rank=rank, pid=pid, started=start_time(pid), host=socket.gethostname(), patience_s=FIRST_TIME_S)


def stack_of(thread_id: int) -> tuple[str, str]:
    """A thread's innermost frames as text, and the module of the last of them."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    if frame is None:
        return "", ""
    text = "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]).rstrip()
    return text, frame.f_globals.get("__name__", "")
