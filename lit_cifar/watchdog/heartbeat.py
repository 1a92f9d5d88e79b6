"""The heartbeat that a process sends to the others once a second."""

import json
import sys
import traceback
from dataclasses import asdict, dataclass, fields
from types import FrameType

_NUM_FRAMES = 4


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A process and its progress.

    Attributes:
        rank: Global rank of the process.
        pid: Its process id on its host.
        started: When the process was started, as returned by `process.start_time`; "" if unknown.
        host: Name of its machine.
        number: Number of the heartbeat, from 0.
        phase: Phase of the main thread.
        step: Optimizer steps that are done.
        events: Number of phases that the main thread has begun.
        idle_s: Seconds since this phase began.
        patience_s: Seconds that this phase may take.
        stack: The main thread's innermost frames, outermost first, once it has been idle for some time.
        waits: Whether it then waited for other processes, see `Activity`.
        works: Whether it computed, or used a disk.
        failure: The end of the traceback with which the main thread failed, or "".
        quiet: Whether the process itself prints the message about its failure.
        order: Number of failures when this one was reported, itself included; 0 without one.
        over: Whether the main thread has finished and need not be watched any more.
    """

    rank: int
    pid: int
    started: str
    host: str
    number: int = 0
    phase: str = "starting"
    step: int = 0
    events: int = 0
    idle_s: float = 0.0
    patience_s: float = 0.0
    stack: str = ""
    waits: bool = False
    works: bool = False
    failure: str = ""
    quiet: bool = False
    order: int = 0
    over: bool = False

    def to_json(self) -> str:
        """One line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Heartbeat":
        """The inverse of `to_json`; fields that this version does not know are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})


def stack_of(thread_id: int) -> tuple[str, str]:
    """A thread's innermost frames as text, and the module of the last of them."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    if frame is None:
        return "", ""
    text = "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]).rstrip()
    return text, frame.f_globals.get("__name__", "")
