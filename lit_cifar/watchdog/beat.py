"""What a process tells the others once a second."""

import json
import sys
import traceback
from dataclasses import asdict, dataclass, fields
from types import FrameType

_NUM_FRAMES = 4


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A process and how far it is.

    Attributes:
        rank: Of the process, among all.
        pid: On its host.
        started: When the process was started, as `process.start_time` has it; "" if unknown.
        host: Its machine's name.
        number: Counts the beats, from 0.
        phase: What the main thread does.
        step: Optimizer steps that are done.
        events: Phases that the main thread has begun.
        idle_s: How long it has been in this one.
        patience_s: How long it may be.
        stack: The main thread's innermost frames, outermost first, once it has been idle for some time.
        waits: Whether it then waited for other processes, see `Activity`.
        works: Whether it computed, or used a disk.
        failure: The end of the traceback with which the main thread failed, or "".
        quiet: Whether the process itself says what is to be said about its failure.
        order: How many failures there were when this one was told, itself included; 0 without one.
        over: Whether the main thread has left in good order and need not be watched any more.
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
    def from_json(cls, text: str | bytes) -> "Beat":
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
