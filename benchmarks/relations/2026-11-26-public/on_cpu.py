"""Runs a script that names CUDA devices on the CPU: `on_cpu.py train.py ARGUMENTS`.

The checker trains on the CPU. A script that calls `torch.cuda.set_device`, or moves tensors to a number, ends by an
error there. This makes every such device the CPU, and says that there are as many accelerators as `on_cpu.py` was told
by the variable ACCELERATORS (default: 0, which is the truth).
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

NUM_ACCELERATORS = int(os.environ.get("ACCELERATORS", "0"))


def on_cpu(device: Any) -> Any:
    """The CPU in place of a CUDA device, its name or (where only a device can stand) its number."""
    is_cuda = str(device).startswith("cuda") if isinstance(device, str | torch.device) else False
    return torch.device("cpu") if is_cuda else device


class OnCpu(TorchFunctionMode):
    """Every function of torch gets the CPU where it was given CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), settings: Any = None) -> Any:
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        args = tuple(map(on_cpu, args))
        if function is torch.Tensor.to and type(args[1:2] and args[1]) is int:
            args = (args[0], torch.device("cpu"), *args[2:])
        return function(*args, **{name: on_cpu(value) for name, value in (settings or {}).items()})


def patch() -> None:
    move, load, wrap = torch.nn.Module.to, torch.load, DistributedDataParallel.__init__
    begin = torch.distributed.init_process_group

    def moved(module: Any, *args: Any, **settings: Any) -> Any:
        args = tuple("cpu" if type(value) is int else on_cpu(value) for value in args)
        return move(module, *args, **{name: on_cpu(value) for name, value in settings.items()})

    def loaded(file: Any, map_location: Any = None, **settings: Any) -> Any:
        return load(file, map_location=on_cpu(map_location), **settings)

    def wrapped(own: Any, module: Any, device_ids: Any = None, output_device: Any = None, **settings: Any) -> None:
        wrap(own, module, **settings)

    def begun(backend: Any = None, *args: Any, **settings: Any) -> None:
        begin("gloo", *args, **settings)

    torch.nn.Module.to, torch.nn.Module.cuda = moved, lambda module, *_: module
    torch.load, DistributedDataParallel.__init__ = loaded, wrapped
    torch.distributed.init_process_group = begun
    torch.cuda.set_device = lambda device: None
    if NUM_ACCELERATORS:
        torch.accelerator.is_available = lambda *_: True
        torch.accelerator.device_count = lambda: NUM_ACCELERATORS
        torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
        torch.accelerator.set_device_index = lambda device: None


def main() -> None:
    patch()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).absolute().parent))
    with OnCpu():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
