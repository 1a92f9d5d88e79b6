"""Saves one checkpoint over another and dies by SIGKILL at the first line of the code that does so, the second, ...

Run as a program with a folder; `test_checkpoint_files` does. Prints what was found after each death, as JSON. A thread
writes it, as in a run.
"""

import json
import os
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lit_cifar.checkpoint import files as checkpoint_files
from lit_cifar.checkpoint.files import LAST, CheckpointFiles, newest_valid, write_checkpoint
from lit_cifar.checkpoint.format import read_checkpoint


def state(step: int) -> dict[str, Any]:
    """A checkpoint that says in every number which step it is of."""
    return {"global_step": step, "weights": torch.full((10_000,), float(step)), "name": "tiny"}


def step_of(path: Path) -> int:
    """The step of a `state`, if all of it is of one."""
    checkpoint = read_checkpoint(path)
    step = int(checkpoint["global_step"])
    assert checkpoint["weights"].eq(step).all()
    return step


def kill_at(line: int) -> None:
    """Make this process kill itself at the so many-th line that its threads run of `checkpoint_files`."""
    lines = count(1)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != checkpoint_files.__file__:
            return None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def save_and_die(folder: Path, line: int) -> bool:
    """Save step 3 where steps 1 and 2 are, in a process that dies at `line`; whether it came so far."""
    for step in (1, 2):
        write_checkpoint(state(step), folder / LAST)
    process = os.fork()
    if process == 0:
        kill_at(line)
        CheckpointFiles().save_checkpoint(state(3), folder / LAST)  # by a thread
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def after_death(folder: Path) -> dict[str, Any]:
    """What a new run finds, and what its first save leaves."""
    path, refused = newest_valid(folder)
    found = {"name": path and path.name, "step": path and step_of(path), "refused": refused}
    found["drafts"] = sum(name.suffix == ".part" for name in folder.iterdir())
    write_checkpoint(state(4), folder / LAST)
    found["later"] = sorted(f"{path.name} {step_of(path)}" for path in folder.iterdir())
    return found


def main(folder: Path) -> None:
    """One death after the other, until one save survives."""
    os.fsync = lambda descriptor: None  # slow, and a kill loses nothing that has been written
    deaths = []
    for line in count(1):
        here = folder / str(line)
        here.mkdir()
        died = save_and_die(here, line)
        deaths.append(after_death(here))
        if not died:
            break
    print(json.dumps(deaths))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
