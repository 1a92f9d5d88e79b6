"""Execute notebooks in place and note their processor time: `python benchmarks/scripts/notebooks.py [NAME ...]`.

The times of the cells are noted by nbclient. `pages.py` then writes both into the texts.
"""

import argparse
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LOOK_EVERY_S = 0.3


@contextmanager
def counted() -> Iterator[dict[int, float]]:
    """Processor time of each process that this one starts, in seconds by process id, but for its last moment."""
    seconds: dict[int, float] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_EVERY_S):
            for process in psutil.Process().children(recursive=True):
                try:
                    used = process.cpu_times()
                except psutil.Error:  # it has just ended
                    continue
                seconds[process.pid] = used.user + used.system

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()


def record(name: str) -> None:
    """Execute a notebook from top to bottom in a fresh kernel, and store it."""
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=None, startup_timeout=600, resources={"metadata": {"path": NOTEBOOKS}})
    with counted() as seconds:
        client.execute()
    notebook["metadata"]["processor_s"] = round(sum(seconds.values()))
    nbformat.write(notebook, path)


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    parser = argparse.ArgumentParser(description="Execute notebooks in place, and note their processor time.")
    parser.add_argument("names", nargs="*", help="such as dp_versus_ddp; all without")
    return parser


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(NOTEBOOKS), str(NOTEBOOKS.parent)])
    for each in parser().parse_args().names or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")):
        record(each)
