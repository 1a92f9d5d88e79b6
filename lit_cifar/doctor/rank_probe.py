"""One of the processes that the doctor starts: it meets the others, measures, and writes what it has found to a file.

Run as `python -m lit_cifar.doctor.rank_probe cpu|cuda FOLDER` with the environment variables that torchrun sets.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lit_cifar.doctor.measurement import Device, measure
from lit_cifar.launch.rendezvous import LocalEnvironment
from lit_cifar.launch.signals import destroy_process_group_at_exit
from lit_cifar.launch.startup import end_with_launcher

_TIMEOUT = timedelta(seconds=30)


def main(make_device: Callable[[torch.device, int], Device] = lambda device, rank: Device(device)) -> None:
    """Measure as the rank that the environment names.

    Args:
        make_device: Called with the rank's device and its number. A test's makes one with a fault.
    """
    end_with_launcher()
    accelerator, folder = sys.argv[1], Path(sys.argv[2])
    environment = LocalEnvironment()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def report(phase: str) -> None:
        (folder / f"rank{rank}.phase").write_text(phase)

    report("the meeting of the processes")
    device = torch.device("cuda", rank) if accelerator == "cuda" else torch.device("cpu")
    with _process_group(environment, device, rank=rank, world_size=world_size):
        own = make_device(device, rank)
        found = measure(own, rank=rank, world_size=world_size, meet=_meet, report=report)
        report("the end")
        _meet()  # no rank leaves while another still needs it
    (folder / f"rank{rank}.json").write_text(json.dumps(asdict(found)))


def _meet() -> None:
    dist.barrier()


@contextmanager
def _process_group(
    environment: LocalEnvironment, device: torch.device, *, rank: int, world_size: int
) -> Iterator[None]:
    """NCCL between GPUs, gloo between CPUs; as in `fit`, the ports are on the loopback interface."""
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=world_size, timeout=_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        yield
    finally:
        destroy_process_group_at_exit()


if __name__ == "__main__":
    main()
