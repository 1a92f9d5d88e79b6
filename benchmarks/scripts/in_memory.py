"""Where the speed of `fit` on a CPU comes from: `python benchmarks/scripts/in_memory.py OUTPUT --root=CIFAR10`.

Four programs take turns. All train torchvision's ResNet18 on CIFAR-10 (32 x 32 pixels) in float32, in batches of 128,
by SGD with momentum, with random crops and flips: `fit`; a plain loop whose loader has two worker processes; a plain
loop that cuts its batches out of one tensor of all images; and the same, which keeps freed memory as `fit` does.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

from lit_cifar.data.datamodule import open_dataset
from lit_cifar.tools.terminal import about

BATCH, WARM_UP, STEPS = 128, 8, 40  # images; steps that are not timed, and all
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
AUGMENTED = Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), ToTensor(), Normalize(MEAN, STD)])
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # glibc's mallopt(3)
PROGRAMS = {
    "fit": ("fit", {}),
    "plain loop, two workers": ("workers", {}),
    "plain loop, tensors in memory": ("memory", {}),
    "the same, freed memory kept": ("memory", KEEPS_MEMORY),
}
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's CIFAR10: each image is opened and augmented by itself."""

    def __init__(self, root: str) -> None:
        images = open_dataset("cifar10", root).load("train")
        self.pixels, self.labels = images.images.permute(0, 2, 3, 1).contiguous().numpy(), images.labels.flatten()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return AUGMENTED(Image.fromarray(self.pixels[index])), int(self.labels[index])


def by_workers(root: str) -> Batches:
    yield from DataLoader(Pictures(root), batch_size=BATCH, shuffle=True, num_workers=2)


def in_memory(root: str) -> Batches:
    """Shifted by up to 4 pixels on black borders, and flipped, as images of bytes; normalised as a batch."""
    images = open_dataset("cifar10", root).load("train")
    padded, labels = torch.nn.functional.pad(images.images, (4, 4, 4, 4)), images.labels.flatten()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    side = torch.arange(32)
    for chosen in torch.randperm(len(padded)).split(BATCH):
        rows, columns = (torch.randint(0, 9, (len(chosen), 1)) + side for _ in range(2))
        columns = torch.where(torch.rand(len(chosen), 1) < 0.5, columns, columns.flip(1))
        batch = padded[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        yield (batch.contiguous().float() / 255 - mean) / std, labels[chosen]


def loop(batches: Batches) -> None:
    """A plain loop, up to the step at which the clock ends it."""
    network = resnet18(num_classes=10).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for images, labels in batches:
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def be_timed(way: str, root: str, file: Path) -> None:
    """Write the time of each step, and end by force after the last."""
    times: list[float] = []

    def note(*_: object) -> None:
        times.append(time.perf_counter())
        if len(times) == STEPS:
            file.write_text(json.dumps(times))
            os._exit(0)

    register_optimizer_step_post_hook(note)
    if way == "fit":
        words = ["fit", "--model.arch=resnet18", "--model.stem=imagenet", "--trainer.accelerator=cpu"]
        words += ["--trainer.precision=32-true", "--model.channels_last=false", f"--data.batch_size={BATCH}"]
        sys.argv = ["lit_cifar", *words, f"--data.root={root}", f"--run_dir={file.parent / 'run'}"]
        runpy.run_module("lit_cifar", run_name="__main__", alter_sys=True)
    else:
        loop(by_workers(root) if way == "workers" else in_memory(root))


def timed(way: str, variables: dict[str, str], root: str) -> float:
    """Images a second, from the end of step 8 to that of step 40."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "times.json")
        words = [sys.executable, __file__, str(file), f"--root={root}", f"--timed={way}"]
        said = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, check=False)
        if not file.exists():
            raise RuntimeError(said.stderr[-3000:])
        times = json.loads(file.read_text())
    return BATCH * (STEPS - WARM_UP) / float(times[-1] - times[WARM_UP - 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timed", help=argparse.SUPPRESS)  # what one of its processes runs
    args = parser.parse_args()
    root = str(Path(args.root).resolve())
    if args.timed:
        be_timed(args.timed, root, args.output)
        return
    record = about() | {"steps": STEPS, "warm_up": WARM_UP, "batch_size": BATCH}
    rounds: list[dict[str, float]] = []
    for _ in range(args.rounds):
        rounds.append({name: timed(way, variables, root) for name, (way, variables) in PROGRAMS.items()})
        args.output.write_text(json.dumps(record | {"rounds": rounds}, indent=1) + "\n")
        print(rounds[-1], flush=True)
    for name in PROGRAMS:
        low, *_, high = speeds = sorted(row[name] for row in rounds)
        print(f"{name}: {median(speeds):,.0f} images a second ({low:,.0f} to {high:,.0f}, n = {len(speeds)})")


if __name__ == "__main__":
    main()
