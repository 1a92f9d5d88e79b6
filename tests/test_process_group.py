"""What a process leaves when it ends."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "raise SystemError('an error that nobody catches')"])
def test_neither_a_group_nor_a_thread_of_it_is_left(end: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = SCRIPT.format(end=end)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "a group: False threads: 1\n", done.stderr
