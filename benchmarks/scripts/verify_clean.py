"""Does `verify` call wrong what is right? `python benchmarks/scripts/verify_clean.py OUTPUT`.

Small networks of one's own, each with another optimizer, schedule, precision or size, in every mode on two CPU devices.
The trainer is taken to be right, so every FAIL is a false alarm, or a mistake that was not known. The results are
written as JSON after every configuration; if OUTPUT is there already, only those that it lacks are run.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image
from run_record import complete

from lit_cifar.cli.usage_errors import cli_exit
from lit_cifar.reporting.output import without_banners
from lit_cifar.tools.terminal import say
from lit_cifar.tools.verify import verify

DEVICES, STEPS = 2, 4
HERE = Path(__file__).parent
# By what is special about each, its flags.
CONFIGURATIONS = {
    "GroupNorm, AdamW, plateaus": "Grouped AdamW 64 --model.lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau",
    "non-persistent buffer, accumulated gradients": "Blurred SGD 64 --trainer.accumulate_grad_batches=2",
    "integer buffer, float32": "Counted SGD 32 --model.optimizer.momentum=0.9",
    "frozen first layer, StepLR": (
        "Frozen SGD 64 --model.optimizer.momentum=0.9 --model.lr_scheduler=StepLR --model.lr_scheduler.step_size=1"
    ),
    "no normalisation, Adagrad, clipped by norm": "Plain Adagrad 64 --trainer.gradient_clip_val=0.1",
    "depthwise convolutions, Muon": "Depthwise lit_cifar.MuonSGD 64",
    "one channel, clipped by value, label smoothing": (
        "Narrow Adam 64 --trainer.gradient_clip_val=0.01 --trainer.gradient_clip_algorithm=value "
        "--model.label_smoothing=0.1"
    ),
    "attention, bfloat16": "Attentive AdamW bf16",
    "BatchNorm, odd batches": "Normalised NAdam 64 --data.batch_size=32 --data.eval_batch_size=7",
    "tied weights, RMSprop": "Tied RMSprop 64",
    "pictures of 224 pixels": (
        "Normalised SGD 64 --data.dataset=folder --data.root=PICTURES --data.image_size=224 --data.num_train=50 "
        "--data.val_size=11 --data.batch_size=24"
    ),
    "no validation": "Grouped SGD 64 --data.val_size=0",
    "dropout, virtual replicas": "Dropped SGD 32 --virtual_replicas=4",
}


def flags_of(configuration: str) -> list[str]:
    """Of words: a network of `clean_networks`, an optimizer, a precision, and further flags."""
    network, optimizer, precision, *more = CONFIGURATIONS[configuration].split()
    flags = [f"--model.network=clean_networks.{network}", f"--model.optimizer={optimizer}", "--model.optimizer.lr=0.01"]
    return [*flags, f"--trainer.precision={precision}", "--trainer.accelerator=cpu", *more]


def draw_pictures(folder: Path) -> None:
    """Five of noise in each of ten classes."""
    noise = np.random.default_rng(0).integers(0, 256, (10, 5, 48, 64, 3), dtype=np.uint8)
    for label, pictures in enumerate(noise):
        (folder / f"class{label}").mkdir()
        for number, pixels in enumerate(pictures):
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.png")


def verified(name: str, modes: Sequence[str], pictures: Path) -> dict[str, Any]:
    """One configuration in all modes that can run it: for each its outcome, and the first thing that was said of it."""
    start = perf_counter()
    args = [flag.replace("PICTURES", str(pictures)) for flag in flags_of(name)]
    with redirect_stdout(StringIO()) as said:
        rows = verify(modes, devices=DEVICES, steps=STEPS, args=args)
    return {
        "configuration": name,
        "flags": flags_of(name),
        "left_out": re.findall(r"^left out (.*)", said.getvalue(), flags=re.MULTILINE),
        "seconds": round(perf_counter() - start, 1),
        "modes": [
            {
                "mode": row.mode,
                "outcome": row.outcome,
                "difference": max(row.differences.values(), default=None),
                "problem": row.problems[0] if row.problems else None,
                "seconds": round(row.seconds, 1),
            }
            for row in rows
        ],
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    outcomes = Counter(mode["outcome"] for row in rows for mode in row["modes"])
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))


def main(output: Path, *, modes: list[str]) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    with TemporaryDirectory(prefix="pictures-") as pictures:
        draw_pictures(Path(pictures))
        rows = complete(
            output,
            [*CONFIGURATIONS],
            lambda name: verified(name, modes, Path(pictures)),
            settings={"devices": DEVICES, "steps": STEPS, "modes": modes},
            tell=lambda row: say(f"{row['configuration']}: {summary([row])}, {row['seconds']:.0f} s"),
        )
    say(summary(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--modes", default="all", help="modes to verify")
    options = parser.parse_args()
    with without_banners(), cli_exit():
        main(options.output, modes=options.modes.split(","))
