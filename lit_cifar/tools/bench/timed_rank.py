"""A rank of `bench recovery`: `python -m lit_cifar`, noting when the imports that it cannot do without are done.

torchrun starts this file by its path. As a module of the package it would import the package first.
"""

import gc
import json
import os
import runpy
import sys
import time
from pathlib import Path


def mark(folder: Path, event: str) -> None:
    """Note the event, the rank, the time by the machine's monotonic clock, and this process's processor time."""
    line = {"event": event, "rank": int(os.environ["RANK"]), "at_s": time.monotonic(), "cpu_s": time.process_time()}
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def run(folder: Path) -> None:
    """Import, and become the command line."""
    mark(folder, "started")
    gc.disable()  # as the package does while it imports
    import lightning.pytorch
    import torch

    gc.freeze()
    gc.unfreeze()
    gc.enable()
    mark(folder, "imported")
    del lightning, torch
    runpy.run_module("lit_cifar", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose modules are the package's
    run(Path(sys.argv.pop(1)))
