"""What a step on a CPU frees stays in the process, so that the next step gets it without page faults."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_cifar.launch import malloc_tuning
from lit_cifar.launch.malloc_tuning import KeepFreedMemory

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
