"""What every case imports: whether it runs with its bug, its seed, and who watches it.

A case is a folder of `cases/`: `case.toml` names the report, `project.py` is a small training that a stranger could
have written. It has the bug where `BUG` is true, and the mended line beside it where it is not. The runner sets the
variables of the environment; without them a project runs with its bug, seed 0, and nobody watches.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BUG = os.environ.get("SILENT_BUG", "1") == "1"
SEED = int(os.environ.get("SILENT_BUG_SEED", "0"))
STEPS = 64  # that are replayed: in these small trainings, most or all
_WATCHED = os.environ.get("SILENT_BUG_WATCHED") == "1"
_OUT = Path(os.environ.get("SILENT_BUG_OUT", "."))  # gets `losses.jsonl` and `reports.jsonl`


def report_loss(loss: Any) -> None:
    """A loss of one step, as the project would show it to its user; rank 0 alone writes it down."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        with (_OUT / "losses.jsonl").open("a") as file:
            file.write(f"{loss.item() if isinstance(loss, torch.Tensor) else loss}\n")


def watching() -> list[Any]:
    """The callbacks that a Lightning project adds to its own."""
    from watcher import Watcher  # not loaded by a project in plain PyTorch

    if not _WATCHED:
        return [Watcher(None, report_loss, write_report)]
    from lit_cifar import Replay  # not loaded by a run that nobody watches

    replay = Replay(STEPS)
    return [replay, Watcher(replay, report_loss, write_report)]


@contextmanager
def watch(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, steps: int = STEPS) -> Iterator[None]:
    """Around the loop of a project in plain PyTorch."""
    if not _WATCHED:
        yield
        return
    from lit_cifar import replay

    with replay(model, *optimizers, steps=steps) as watched:
        yield
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_report(watched.report.as_json(), "\n".join(watched.report.lines()))


def write_report(report: dict[str, Any], text: str) -> None:
    """What a tool says of a run, as JSON and as text."""
    with (_OUT / "reports.jsonl").open("a") as file:
        file.write(json.dumps(report | {"text": text}) + "\n")


def spawn(main: Callable[[int], None], processes: int = 2) -> None:
    """Run `main(rank)` in processes that form a gloo group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Nothing has been computed yet, so that a fork is safe; it imports torch once.
    mp.start_processes(_in_group, args=(main, processes, port), nprocs=processes, start_method="fork")


def _in_group(rank: int, main: Callable[[int], None], processes: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(processes))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    main(rank)
    dist.destroy_process_group()
