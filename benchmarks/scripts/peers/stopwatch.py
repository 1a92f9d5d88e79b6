"""Times a program of someone else, unchanged: `python stopwatch.py FILE STEPS IMAGES WORDS...`.

WORDS are a script or a module. It is ended by force after STEPS optimizer steps, or runs to its end with 0. FILE has
the seconds from the start of the process to each step, and the numbers of images in training and in evaluation; a file
beside it has all parameters, sorted. torchvision's CIFAR10 has its first IMAGES images in each split, or all with 0.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchvision.datasets import CIFAR10

from lit_cifar.data.datamodule import open_dataset


def read_binaries(num_images: int) -> None:
    """Let torchvision's data set read the binary edition in its root, and no more than `num_images` of it."""

    def read(self: Any, root: str, train: bool = True, transform: Any = None, **_: Any) -> None:
        images = open_dataset("cifar10", root).load("train" if train else "test", num_images=num_images or None)
        self.data, self.targets = images.images.permute(0, 2, 3, 1).numpy().astype(np.uint8), images.labels.tolist()
        self.transform, self.target_transform, self.root, self.transforms = transform, None, root, None
        self.class_to_idx = {name: label for label, name in enumerate(images.classes)}

    CIFAR10.__init__ = read  # type: ignore[method-assign]


def watch(file: Path, steps: int) -> None:
    began = psutil.Process().create_time()
    times: list[float] = []
    seen = {"trained": 0, "evaluated": 0}

    def write() -> None:
        file.write_text(json.dumps({"steps": times, **seen}))

    def count(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if type(module).__name__ == "ResNet":
            seen["trained" if module.training else "evaluated"] += len(args[0])
            write()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        times.append(time.time() - began)
        if len(times) == steps:
            write()
            parameters = [tensor.detach().flatten() for group in optimizer.param_groups for tensor in group["params"]]
            torch.save(torch.cat(parameters).sort().values, file.with_suffix(".pt"))
            os._exit(0)

    register_module_forward_pre_hook(count)
    register_optimizer_step_post_hook(note)


def main() -> None:
    file, steps, num_images, *words = sys.argv[1:]
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    torch.manual_seed(0)
    read_binaries(int(num_images))
    watch(Path(file).with_suffix(f".{rank}.json"), int(steps))
    sys.argv = words
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
