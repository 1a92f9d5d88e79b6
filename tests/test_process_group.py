"""A process that used gloo leaves its group before the interpreter shuts down."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Handlers run in reverse order: the one registered before the package is imported sees what the package's has done.
SCRIPT = """
import atexit, torch.distributed as dist
atexit.register(lambda: print("a group is left:", dist.is_initialized()))
import lit_cifar.strategies
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_importing_the_package_destroys_the_group_at_exit() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "a group is left: False\n"


# What a trainer leaves: groups in a cycle with a DDP module, or in the frames of an error that nobody caught.
THREADS = """
import atexit, os, torch, torch.distributed as dist
atexit.register(lambda: print("threads:", len(os.listdir("/proc/self/task"))))
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc to count threads in")
@pytest.mark.parametrize(
    "end", ["pass", pytest.param("raise SystemError('an error that nobody catches')", marks=pytest.mark.slow)]
)
def test_no_thread_of_a_group_outlives_it(end: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = THREADS.format(end=end)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "threads: 1\n", done.stderr
