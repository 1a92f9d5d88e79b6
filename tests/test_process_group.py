"""What a process keeps while it trains, and what it leaves when it ends."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_cifar.launch import malloc_tuning
from lit_cifar.launch.malloc_tuning import KeepFreedMemory

# Handlers run in reverse order: the one registered before the package is imported sees what the package's has done.
# What a trainer leaves: groups in a cycle with a DDP module, or in the frames of an error that nobody caught.
SCRIPT = """
import atexit, os, torch, torch.distributed as dist
atexit.register(lambda: print("a group:", dist.is_initialized(), "threads:", len(os.listdir("/proc/self/task"))))
import lit_cifar.strategies

def train():
    module = torch.nn.Linear(2, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    module.cycle = [ddp, dist.new_group([0]), module]
    ddp(torch.ones(2)).sum().backward()
    {end}

train()
"""


@pytest.mark.parametrize(
    "end", ["pass", pytest.param("raise SystemError('an error that nobody catches')", marks=pytest.mark.slow)]
)
def test_neither_a_group_nor_a_thread_of_it_is_left(end: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = SCRIPT.format(end=end)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "a group: False threads: 1\n", done.stderr


# ---------------------------------------------------------------- freed memory


# The fewest page faults of writing and freeing 64 MB and 1 MB: the heap grows until small blocks have their places.
_FAULTS = """
import resource, torch
from lit_cifar.launch.malloc_tuning import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for num_bytes in (1 << 26, 1 << 20):
        torch.empty(num_bytes, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(10)))
keep_freed_memory()
print(min(faults() for _ in range(10)))
"""


def test_freed_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", _FAULTS], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    pages = 2**26 / 4096
    assert before > pages / 2
    assert after < pages / 100


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("cuda", 0)])
def test_runs_on_cpus_keep_it(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(malloc_tuning, "keep_freed_memory", lambda: calls.append(True))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    KeepFreedMemory().setup(trainer, SimpleNamespace(), "fit")  # type: ignore[arg-type]
    assert len(calls) == count
