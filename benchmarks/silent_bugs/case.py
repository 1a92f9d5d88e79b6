"""What every case imports: whether it runs with its bug, its seed, and a place for a tool that watches it.

A case is a folder of `cases/`: `case.toml` names the report, `project.py` is a small training that a stranger could
have written. It has the bug where `BUG` is true, and the mended line beside it where it is not. `relate.py` sets
SILENT_BUG; without it a project runs with its bug.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BUG = os.environ.get("SILENT_BUG", "1") == "1"
SEED = 0


def report_loss(loss: Any) -> None:
    """A loss of one step, as the project would show it to its user; rank 0 alone prints it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {loss.item() if isinstance(loss, torch.Tensor) else loss}")


def watching() -> list[Any]:
    """The callbacks that a tool adds to those of a Lightning project; here none."""
    return []


@contextmanager
def watch(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> Iterator[None]:
    """Around the loop of a project in plain PyTorch, for a tool; here nothing."""
    yield


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
