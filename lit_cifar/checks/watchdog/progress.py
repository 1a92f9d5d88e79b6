"""Where the main thread stands, and for how long it has neither got on nor worked."""

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary

import lightning
import psutil
import torch

from lit_cifar.checks.watchdog import HELPER

_LOOK_AFTER_S = 3.0  # a thread that calls hooks more often is not observed
# Share of one processor. A thread that hangs but polls uses less, one that computes on a busy machine uses more.
_LEAST_SHARE = 0.05
_NUM_FRAMES = 3
# A line of Python in one of these is not the user's.
_LIBRARIES = ("<", sysconfig.get_path("stdlib"), *torch.__path__, *lightning.__path__)
_COLLECTIVES = "torch/distributed/distributed_c10d.py"


class Progress:
    """Observes the main thread. That one calls `note`, the watchdog's thread calls `look`.

    A process works if it uses a processor or waits for a disk (see `effort`), but not in a collective operation, where
    the main thread may use a processor while it waits. With `on_gpu` a main thread that uses one and stays at one place
    does not work: CUDA spins while a collective operation is stuck on the GPU. Without a GPU it computes, such as in
    backward. `peers` are the pids of the ranks on this machine.
    """

    def __init__(self, *, peers: Collection[int] = (), on_gpu: bool = False) -> None:
        self._peers, self._on_gpu = peers, on_gpu
        self._main_thread = threading.main_thread().ident or 0
        self._hooks: set[str] = set()
        self._noted = True
        self._quiet_s = 0.0  # time without a hook
        self._effort = 0.0, 0.0, False
        self.is_first_time = True  # whether what follows the newest hook is done for the first time, and may compile
        self.step = 0  # optimizer steps that are done
        self.place = ""  # line at which the main thread is
        self.idle_s = 0.0  # time in which that thread has not got on, nor its process worked

    def note(self, hook: str, *, step: int) -> None:
        """Note that the main thread gets on."""
        self.is_first_time = hook not in self._hooks
        self._hooks.add(hook)
        self.step, self._noted = step, True

    def look(self, passed_s: float) -> None:
        """Observe the main thread, `passed_s` after the last time."""
        frames, place_before, effort_before = _frames_of(self._main_thread), self.place, self._effort
        self.place = place_of(frames)
        if self._noted:
            self._noted, self._quiet_s, self.idle_s = False, 0.0, 0.0
            return
        known = self._quiet_s > _LOOK_AFTER_S
        self._quiet_s += passed_s
        self.idle_s += passed_s
        if self._quiet_s > _LOOK_AFTER_S:
            main_s, others_s, on_disk = self._effort = effort(self._peers)
            spins = self._on_gpu and self.place == place_before
            used_s = others_s - effort_before[1] + (0.0 if spins else main_s - effort_before[0])
            works = on_disk or (known and used_s > _LEAST_SHARE * passed_s)
            if works and not (frames and frames[-1].filename.endswith(_COLLECTIVES)):
                self.idle_s = 0.0


def _frames_of(thread_id: int) -> list[FrameSummary]:
    """The frames of a thread of this process, outermost first."""
    frame = sys._current_frames().get(thread_id)
    return list(traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False))[::-1] if frame else []


def place_of(frames: list[FrameSummary]) -> str:
    """The innermost line that is not a library's, and the innermost ones of libraries below it, as one line of text."""
    own = max((i for i, frame in enumerate(frames) if not frame.filename.startswith(_LIBRARIES)), default=-1)
    named = [(frames[own].filename, frames[own])] if own >= 0 else []
    named += [("/".join(Path(frame.filename).parts[-2:]), frame) for frame in frames[own + 1 :][-_NUM_FRAMES:]]
    return " > ".join(f"{name}:{frame.lineno} ({frame.name})" for name, frame in named)


def effort(peers: Collection[int]) -> tuple[float, float, bool]:
    """Processor time in seconds of the main thread, and of others that work for this process's training.

    The others are the main thread's helpers, but not NCCL's threads, which use a processor while they wait, and the
    processes that this one has started, such as compilers and data loaders, but not the other ranks, whose pids are
    `peers`. The last value is whether one of all waits for a disk.
    """
    main_s, others_s, on_disk = 0.0, 0.0, False
    main = os.getpid()  # `native_id` of a main thread that has been forked is that of its parent
    own = {main} | {thread.native_id for thread in threading.enumerate() if thread.name.startswith(HELPER)}
    with suppress(psutil.Error, OSError):
        me = psutil.Process()
        times = {each.id: each.user_time + each.system_time for each in me.threads() if each.id in own}
        main_s = times.pop(main, 0.0)
        others_s = sum(times.values())
        for process in (*map(psutil.Process, own), *_started_by(me, peers)):
            with suppress(psutil.Error, OSError):
                on_disk = on_disk or process.status() == psutil.STATUS_DISK_SLEEP
                if process.pid not in own:
                    used = process.cpu_times()
                    others_s += used.user + used.system
    return main_s, others_s, on_disk


def _started_by(process: psutil.Process, peers: Collection[int]) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        for child in process.children():
            if child.pid not in peers:
                yield child
                yield from _started_by(child, peers)
