"""The heartbeat that a process sends to the others once a second."""

import json
import sys
import traceback
from dataclasses import asdict, dataclass
from types import FrameType

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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Heartbeat":
        return cls(**json.loads(text))


def stack_of(thread_id: int) -> tuple[str, str]:
    """A thread's innermost frames as text, and the module of the last of them."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    if frame is None:
        return "", ""
    text = "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]).rstrip()
    return text, frame.f_globals.get("__name__", "")
