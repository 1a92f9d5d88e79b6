"""What helps where classes are unequal: `python benchmarks/scripts/unequal.py OUTPUT --cifar10 ROOT [FLAGS]`.

FLAGS go to `fit`. The network of `fast_9_epochs` is trained on pictures of CIFAR-10: of the 45,000 training images that
`--data.val_size=5000` leaves, class c keeps the first 4,500 * 100 ** (-c / 9), the usual exponential profile (Cui et
al., "Class-balanced loss", 2019), which is 4,500 of the first class and 45 of the last. The 5,000 that are held out,
about 500 of each class, are counted after the last epoch with one view and with two; the test images are not looked at.
"""

import argparse
import tempfile
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image
from recipes import prepare, trained
from run_record import complete, run_script, with_seeds

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.tools.terminal import say

RECIPE = "fast_9_epochs"
TRIALS = {
    "the recipe": [],
    "class weights": ["--data.balance.class_weights=balanced"],
    "equal draws": ["--data.balance.draw_equally=true"],
}


def write_pictures(root: Path, folder: Path) -> None:
    """Write `folder`/train and `folder`/val from CIFAR-10 in `root`."""
    data = CIFAR10DataModule(str(root), val_size=5000, download=False)
    data.prepare_data()
    data.setup("fit")
    for split in ("train", "val"):
        images = data.sets[split]
        for label, name in enumerate(images.classes):
            most = round(4500 * 100 ** (-label / 9)) if split == "train" else None
            place = folder / split / name
            place.mkdir(parents=True)
            for number in (images.labels == label).nonzero()[:most, 0].tolist():
                Image.fromarray(images.images[number].permute(1, 2, 0).numpy()).save(place / f"{number:05}.png")


def main(output: Path, flags: list[str], *, cifar10: Path, seeds: int, at_once: int = 1) -> None:
    """All trials have a first seed before one has a second."""
    prepare()
    with tempfile.TemporaryDirectory(prefix="unequal-") as folder:
        write_pictures(cifar10, Path(folder))
        pictures = ["--data.dataset=folder", f"--data.root={folder}", "--data.val_size=null"]
        pictures.append("--trainer.limit_val_batches=0")

        def train(case: tuple[int, str]) -> dict[str, Any]:
            seed, name = case
            words = [*pictures, *TRIALS[name], *flags]
            return {"trial": name} | trained(RECIPE, words, seed=seed, at_once=at_once, split="val")

        rows = complete(
            output,
            [*product(range(seeds), TRIALS)],
            train,
            settings={"recipe": RECIPE, "trials": TRIALS, "flags": flags},
            tell=lambda row: say(f"seed {row['seed']}, {row['trial']}: {100 * row['correct'] / row['total']:.2f} %"),
            at_once=at_once,
        )
    for name in TRIALS:
        right = [100 * row["correct"] / row["total"] for row in rows if row["trial"] == name]
        say(f"{name}: {fmean(right):.2f} %, n = {len(right)}")


def parser() -> argparse.ArgumentParser:
    """Both remedies beside the recipe."""
    parser = argparse.ArgumentParser(description="Compare what helps where classes are unequal.")
    parser.add_argument("--cifar10", type=Path, required=True, help="folder with CIFAR-10")
    return with_seeds(parser, what="runs of each trial")


if __name__ == "__main__":
    run_script(parser(), main)
