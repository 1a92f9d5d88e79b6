"""Run in place of a training, by torchrun: one JSON line in `FOLDER/rank<r>` about what the process has found."""

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def num_sockets() -> int:
    """Of this process."""
    modes = []
    for path in Path("/dev/fd").iterdir():
        try:
            modes.append(os.fstat(int(path.name)).st_mode)
        except OSError:  # the one by which the folder was read
            continue
    return sum(map(stat.S_ISSOCK, modes))


def noted_parent() -> int:
    """Who the package says has started this process, where it has been imported: to do so takes seconds."""
    module = sys.modules.get("lit_cifar.launch.startup")
    return module.PARENT_PID if module else os.getppid()


def num_lines(folder: Path) -> int:
    """Of all ranks and restarts so far."""
    return sum(len(path.read_text().splitlines()) for path in folder.glob("rank*"))


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    found = {
        "pid": os.getpid(),
        "words": words,
        "world_size": os.environ["WORLD_SIZE"],
        "restart": os.environ["TORCHELASTIC_RESTART_COUNT"],
        "leads_a_session": os.getsid(0) == os.getpid(),
        "parents": [os.getppid(), noted_parent()],
        "default_signals": [signal.getsignal(number) is signal.SIG_DFL for number in HANDLED],
        "interruptible": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sockets": num_sockets(),
    }
    with (Path(folder) / f"rank{os.environ['RANK']}").open("a") as file:
        file.write(json.dumps(found) + "\n")
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    while num_lines(Path(folder)) < (restart + 1) * int(
        os.environ["WORLD_SIZE"]
    ):  # torchrun ends the others of one that fails
        time.sleep(0.01)
    if restart < 2:
        sys.excepthook = lambda kind, error, traceback: print(f"{error}, says rank {os.environ['RANK']}")
        raise RuntimeError("once more")
