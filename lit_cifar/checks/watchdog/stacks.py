"""The collective operation and the line of Python that a main thread is in: here, or in another process."""

import faulthandler
import fcntl
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import FrameSummary
from typing import NamedTuple

import lightning
import psutil
import torch

_NUM_FRAMES = 4
_FILE_NAME = "lit_cifar-stack"
REQUEST = signal.SIGRTMIN + 7  # asks a process to write down where its main thread is
_ANSWER_S = 0.1
# A line of Python in one of these is not the user's.
_LIBRARIES = ("<", sysconfig.get_path("stdlib"), *torch.__path__, *lightning.__path__)
_COLLECTIVES, _LOADER = "torch/distributed/distributed_c10d.py", "torch/utils/data/dataloader.py"


class Stack(NamedTuple):
    place: str = ""  # the collective operation, if any, and the innermost line that is not a library's
    text: str = ""  # that line and the innermost frames, outermost first
    module: str = ""  # module of the innermost frame
    loads: bool = False  # whether the thread waits for a data loader


def stack_of(thread_id: int) -> Stack:
    frame = sys._current_frames().get(thread_id)
    frames = traceback.extract_stack(frame) if frame else []
    module = frame.f_globals.get("__name__", "") if frame else ""
    return described(frames)._replace(module=module, loads=any(frame.filename.endswith(_LOADER) for frame in frames))


def described(frames: list[FrameSummary]) -> Stack:
    own = next((frame for frame in reversed(frames) if not frame.filename.startswith(_LIBRARIES)), None)
    shown, line = frames[-_NUM_FRAMES:], []
    if own is not None:
        line = [f"{own.filename}:{own.lineno} ({own.name})"]
        shown = shown if own in shown else [own, *shown]
    calls = [frame.name for frame in frames if frame.filename.endswith(_COLLECTIVES)]
    return Stack(", called at ".join(calls[:1] + line), "".join(traceback.format_list(shown)).rstrip())


@cache
def trace_file(pid: int) -> int:
    """Descriptor of a file in memory for the stack of this process's main thread at a fatal signal or a `request`.

    A worker that is forked has the same file and the same handlers. A program that is started has neither.
    """
    file = os.memfd_create(_FILE_NAME)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def leave_traces(file: int) -> None:
    """Let this process write into its trace file.

    At the end of each run Lightning sets the handlers of all signals to those that Python knows, which faulthandler's
    are not. faulthandler believes in its own until it is told to remove them.
    """
    faulthandler.unregister(REQUEST)
    faulthandler.register(REQUEST, file, all_threads=False)
    if _is_free(file):
        faulthandler.disable()
        faulthandler.enable(file)  # all threads are written, the main one last


@cache
def _is_free(file: int) -> bool:
    """Whether faulthandler had no other file when it was first asked to write into `file`."""
    return not faulthandler.is_enabled()


def request(pid: int, file: int) -> None:
    """Ask a process to write into its trace file. Even a main thread that keeps the interpreter's lock can."""
    with suppress(OSError):
        if _FILE_NAME in str(Path(f"/proc/{pid}/fd/{file}").readlink()):
            caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if caught and int(caught[1], 16) >> (REQUEST - 1) & 1:  # otherwise the signal would end the process
                os.kill(pid, REQUEST)


def read_trace(file: int) -> str:
    """The content of a trace file, as the `text` of a `Stack`, after the fatal signal if there was one."""
    error, frames = _traced(file)
    return "\n".join(filter(None, [error, described(frames).text]))


def _traced(file: int) -> tuple[str, list[FrameSummary]]:
    text = os.pread(file, 2**16, 0).decode(errors="replace")
    stacks = re.split(r"^(?=Current thread 0x|Thread 0x|Stack )", text, flags=re.MULTILINE)
    stack = next((each for each in stacks if each.startswith("Current")), stacks[-1])
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', stack, re.MULTILINE)
    error = re.search("^Fatal Python error: .*", text, re.MULTILINE)
    return error[0] if error else "", [FrameSummary(name, int(line), where) for name, line, where in reversed(found)]


def place_in_worker() -> str:
    """The process and line that a data loader waits for, or "" if its workers are idle; takes a moment for each."""
    file = trace_file(os.getpid())
    for worker in psutil.Process().children():
        with suppress(psutil.Error):
            if worker.status() == psutil.STATUS_STOPPED:
                return f"process {worker.pid}, which is stopped"
        os.ftruncate(file, 0)
        request(worker.pid, file)
        time.sleep(_ANSWER_S)
        frames = _traced(file)[1]
        begin = next((i for i, frame in enumerate(frames) if frame.name == "_worker_loop"), len(frames))
        if place := described(frames[begin:]).place:
            return f"process {worker.pid} at {place}"
    return ""
