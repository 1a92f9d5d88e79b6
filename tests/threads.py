"""Ranks as threads of this process, with the process group of torch's own tests: no process is started."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg as threaded

T = TypeVar("T")


def on_ranks(world_size: int, function: Callable[[int], T]) -> list[T]:
    """What `function` returns on each rank."""
    store = dist.HashStore()

    def run(rank: int) -> T:
        torch.set_num_threads(1)  # of operators, which each thread starts with as many as there are cores
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            return function(rank)
        except BaseException as error:
            threaded.ProcessLocalGroup.exception_handle(error)  # or the others would wait
            raise
        finally:
            dist.destroy_process_group()

    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(run, range(world_size)))
    finally:
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
        threaded.ProcessLocalGroup.reset()
