"""Try changes of a recipe on held-out images: `python benchmarks/scripts/trials.py OUTPUT [FLAGS]`.

The recipe is `muon_12_epochs`. FLAGS go to `fit`, e.g. `--data.root=/datasets`. Of the training images 5,000 are held
out, others for each seed, and counted after the last epoch, with mirror images too; the test images are not looked at.
All trials have a first seed before one has a second. The results are written as JSON after every run; if OUTPUT is
there already, only what it lacks is trained.
"""

import argparse
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import torch
from recipes import COUNTS, prepare, trained
from run_record import complete, run_script, with_seeds
from torch.nn.modules.batchnorm import _BatchNorm

from lit_cifar.tools.terminal import say

RECIPE = "muon_12_epochs"
_HELD_OUT = ["--data.val_size=5000", "--trainer.limit_val_batches=0"]
_MOMENTUM, _RATE = "--model.optimizer.momentum=0.6", "--model.optimizer.lr=0.24"
_SCHEDULE = "--model.lr_scheduler"
_AVERAGE = "--trainer.callbacks"

# Of airbench94 and airbench96 (https://github.com/KellerJordan/cifar10-airbench), but for the averages in place of its
# lookahead. The smaller images and masked batches of airbench96 are not among them.
TRIALS = {
    "the recipe": [],
    "no warm-up": [f"{_SCHEDULE}=lit_cifar.WarmupDecay", f"{_SCHEDULE}.warmup=0", f"{_SCHEDULE}.decay=linear"],
    "alternating flips": ["--data.augment.alternate_flips=true"],
    "reflected borders": ["--data.augment.reflect=true"],
    "momentum 0.6": [_MOMENTUM],
    "momentum 0.6, rate 0.24": [_MOMENTUM, _RATE],
    "momentum 0.6, rate 0.24, batch 2000": [_MOMENTUM, _RATE, "--data.batch_size=2000"],
    "BatchNorm momentum 0.4": [f"{_AVERAGE}+=trials.BatchNormMomentum", f"{_AVERAGE}.momentum=0.4"],
    "average of weights": [
        f"{_AVERAGE}+=lightning.pytorch.callbacks.EMAWeightAveraging",
        f"{_AVERAGE}.decay=0.9",
        f"{_AVERAGE}.update_every_n_steps=5",
        f"{_AVERAGE}.device={'cuda' if torch.cuda.is_available() else 'cpu'}",
    ],
}
TRIALS["all of these"] = [flag for flags in TRIALS.values() for flag in flags]


class BatchNormMomentum(L.Callback):
    """How much of a batch's statistics goes into the running ones."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before the network is compiled."""
        for layer in pl_module.modules():
            if isinstance(layer, _BatchNorm):
                layer.momentum = self.momentum


def summary(rows: list[dict[str, Any]]) -> str:
    """For each trial the mean accuracies, how far they are from the recipe's with the same seeds, and the time."""
    return "\n".join(_line(name, rows) for name in dict.fromkeys(row["trial"] for row in rows))


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    own = {row["seed"]: row for row in rows if row["trial"] == name}
    recipe = {row["seed"]: row for row in rows if row["trial"] == "the recipe"}
    shown = []
    for count, views in COUNTS.items():
        right = {seed: 100 * row[count] / row["total"] for seed, row in own.items()}
        gains = [right[seed] - 100 * recipe[seed][count] / recipe[seed]["total"] for seed in own if seed in recipe]
        gain = f" ({fmean(gains):+.2f})" if gains else ""
        shown.append(f"{views} views {fmean(right.values()):.2f} %{gain}")
    return f"{name}: {', '.join(shown)}, {fmean(row['train_s'] for row in own.values()):.1f} s, n = {len(own)}"


def main(output: Path, flags: list[str], *, seeds: int, at_once: int = 1, only: list[str] | None = None) -> None:
    """One after the other unless `at_once` says otherwise, so that their times are their own."""
    prepare()

    def train(case: tuple[int, str]) -> dict[str, Any]:
        seed, name = case
        words = [*_HELD_OUT, *TRIALS[name], *flags]
        return {"trial": name} | trained(RECIPE, words, seed=seed, at_once=at_once, split="val")

    rows = complete(
        output,
        [*product(range(seeds), only or TRIALS)],
        train,
        settings={"recipe": RECIPE, "trials": TRIALS, "only": only, "flags": flags},
        tell=lambda row: say(f"seed {row['seed']}, {summary([row])}"),
        at_once=at_once,
    )
    say(summary(rows))


def parser() -> argparse.ArgumentParser:
    """All trials unless some are named."""
    parser = argparse.ArgumentParser(description="Try changes of a recipe on held-out images.")
    parser.add_argument("--only", action="append", choices=[*TRIALS], help="a trial; may be repeated")
    return with_seeds(parser, what="runs of each trial")


if __name__ == "__main__":
    run_script(parser(), main)
