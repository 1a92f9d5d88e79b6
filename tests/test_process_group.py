"""A process that used gloo leaves its group before the interpreter shuts down."""

import subprocess
import sys

import torch.distributed as dist

from lit_cifar.strategies.process_group import destroy_process_group_at_exit

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


def test_without_a_group_there_is_nothing_to_do() -> None:
    destroy_process_group_at_exit()
    assert not dist.is_initialized()
