"""CPU time of policies, jitter and erasing beside torchvision's on PIL images, and of each operation.

    python benchmarks/scripts/policy_speed.py policies.json --root=data --rounds=9

Both sides run in turn in one thread, and each time is the median over the rounds, of the thread's CPU time. Ours is for
blocks as the loader makes them, draws included. torchvision's is for PIL images as they are, without the conversions
from and to tensors that a pipeline has.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import PIL
import torch
from PIL.Image import Image
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import functional as F

from lit_cifar.data.datamodule import open_dataset
from lit_cifar.data.policies import NUM_MAGNITUDES, Policy, changed, policy_table
from lit_cifar.launch.malloc_tuning import keep_freed_memory
from lit_cifar.tools.terminal import about

POLICIES: dict[str, tuple[dict[str, Any], Callable[[Image], Image]]] = {
    "TrivialAugmentWide": ({"name": "trivial_augment_wide"}, transforms.TrivialAugmentWide()),
    "RandAugment, 2 operations, magnitude 9": ({"name": "rand_augment"}, transforms.RandAugment()),
    "ColorJitter(0.4, 0.4, 0.4)": ({"jitter": 0.4}, transforms.ColorJitter(0.4, 0.4, 0.4)),
    "ColorJitter(0.4, 0.4, 0.4, 0.1)": ({"jitter": 0.4, "hue": 0.1}, transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)),
}


def sheared(image: Image, across: float, down: float) -> Image:
    shear = [math.degrees(math.atan(each)) for each in (across, down)]
    return F.affine(image, 0.0, [0, 0], 1.0, shear, center=[0, 0])


# In the order of the table; each with the strength of TrivialAugmentWide at its magnitude 20 of 30.
OPERATIONS: dict[str, Callable[[Image], Image]] = {
    "Identity": lambda image: image,
    "ShearX": lambda image: sheared(image, 0.66, 0),
    "ShearY": lambda image: sheared(image, 0, 0.66),
    "TranslateX": lambda image: F.affine(image, 0.0, [21, 0], 1.0, [0.0, 0.0]),
    "TranslateY": lambda image: F.affine(image, 0.0, [0, 21], 1.0, [0.0, 0.0]),
    "Rotate": lambda image: F.rotate(image, 90),
    "Brightness": lambda image: F.adjust_brightness(image, 1.66),
    "Color": lambda image: F.adjust_saturation(image, 1.66),
    "Contrast": lambda image: F.adjust_contrast(image, 1.66),
    "Sharpness": lambda image: F.adjust_sharpness(image, 1.66),
    "Posterize": lambda image: F.posterize(image, 4),
    "Solarize": lambda image: F.solarize(image, 85),
    "AutoContrast": F.autocontrast,
    "Equalize": F.equalize,
}


def cases(images: Tensor, size: int) -> dict[str, tuple[Callable[[], Any], Callable[[Image], Image]]]:
    """Ours on the whole block, and torchvision's on one image."""
    ids = torch.arange(len(images))
    made: dict[str, tuple[Callable[[], Any], Callable[[Image], Image]]] = {}
    for name, (settings, theirs) in POLICIES.items():
        policy = Policy(**settings)

        def ours(policy: Policy = policy) -> Tensor:
            return policy(images, iter(policy.draw(ids, (size, size), seed=0, epoch=0)))

        made[name] = ours, theirs
    table = policy_table("trivial_augment_wide", size, size, images.device)
    few = images[: max(1, len(images) // len(OPERATIONS))]  # as many as go through an operation together
    few = few.repeat(len(images) // len(few), 1, 1, 1)
    for place, (name, theirs) in enumerate(OPERATIONS.items()):
        rows = table[(place * NUM_MAGNITUDES + 20) * 2].expand(len(few), -1)

        def one(rows: Tensor = rows) -> Tensor:
            parts = zip(few.split(73), rows.split(73), strict=True)
            return torch.cat([changed(part, own[:, 0], own[:, 1:]) for part, own in parts])

        made[name] = one, theirs
    return made


def measure(images: Tensor, size: int, rounds: int, num_theirs: int) -> dict[str, dict[str, float]]:
    """Microseconds of CPU time for an image."""
    theirs_images = [transforms.functional.to_pil_image(image) for image in images[:num_theirs]]
    times: dict[str, tuple[list[float], list[float]]] = {}
    for turn in range(rounds + 1):
        for name, (ours, theirs) in cases(images, size).items():
            before = time.thread_time()
            ours()
            between = time.thread_time()
            for image in theirs_images:
                theirs(image)
            after = time.thread_time()
            if turn:
                own, other = times.setdefault(name, ([], []))
                own.append((between - before) / len(images) * 1e6)
                other.append((after - between) / len(theirs_images) * 1e6)
    rows = {}
    for name, (own, other) in times.items():
        ratios = sorted(b / a for a, b in zip(own, other, strict=True))
        rows[name] = {"us": median(own), "theirs_us": median(other), "ratio": median(ratios)}
        rows[name] |= {"least_ratio": ratios[0], "most_ratio": ratios[-1]}
    return {name: {key: round(value, 2) for key, value in row.items()} for name, row in rows.items()}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time policies beside torchvision's.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--root", default="data", help="folder of CIFAR-10")
    parser.add_argument("--rounds", type=int, default=9)
    return parser


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `fit` does
    source = open_dataset("cifar10", args.root)
    images = source.load("train", num_images=1022).images  # 14 times 73
    large = torch.nn.functional.interpolate(images[:28].float(), size=(224, 224), mode="bicubic").clamp(0, 255).byte()
    found = {
        "32 x 32": measure(images, 32, args.rounds, 400),
        "224 x 224": measure(large, 224, args.rounds, 28),
    }
    for size, rows in found.items():
        for name, row in rows.items():
            print(size, name, *row.values(), sep="\t")
    record = about() | {"pillow": PIL.__version__, "rounds": args.rounds, "microseconds": found}
    args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
