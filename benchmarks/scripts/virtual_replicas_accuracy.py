"""Train with and without `--virtual_replicas=4`: `benchmarks/scripts/virtual_replicas_accuracy.py OUTPUT [FLAGS]`.

Does it cost accuracy that BatchNorm normalises parts of a batch? FLAGS go to `fit`, e.g. `--data.root=/datasets`. Both
runs of a pair have the same initial weights, order and augmentation. The results are written as JSON after every run;
if OUTPUT is there already, only what it lacks is trained.
"""

import argparse
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import notebooks_path  # noqa: F401  # for `analysis`
from fit_and_test import fit_and_test
from run_record import complete, run_script, with_seeds

from analysis.comparing_runs import paired
from lit_cifar.tools.terminal import say

PARTS = 4
TIMEOUT_S = 4 * 3600.0
SETTINGS = [
    "--model.arch=resnet18",
    "--model.stem=imagenet",
    "--data.batch_size=128",
    "--data.eval_batch_size=1000",
    "--data.val_size=0",
    "--trainer.max_epochs=3",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.enable_progress_bar=false",
    "--figures.every_n_epochs=0",
]


def trained(flags: list[str], *, seed: int, parts: int | None) -> dict[str, Any]:
    """Train and test once."""
    own = [f"--seed_everything={seed}", f"--data.seed={seed}"]
    own += [] if parts is None else [f"--virtual_replicas={parts}"]
    result = fit_and_test([*SETTINGS, *flags, *own], timeout_s=TIMEOUT_S)
    found = {"seed": seed, "parts": parts, "losses": result.logged("train/loss"), "correct": result.correct}
    return found | {"total": result.total, "seconds": round(result.seconds)}


def summary(rows: list[dict[str, Any]]) -> str:
    """A table: mean accuracy and standard deviation of both groups, and the 95 % interval of their difference."""
    groups = [
        [
            100 * row["correct"] / row["total"]
            for row in sorted(rows, key=lambda row: row["seed"])
            if row["parts"] == kind
        ]
        for kind in (None, PARTS)
    ]
    found = paired(groups[1], groups[0])
    cells = [f"{fmean(group):.2f} +- {stdev(group):.2f}" for group in groups]
    cells += [
        f"{found.difference:+.2f}",
        f"{found.low:+.2f} to {found.high:+.2f}",
        f"{found.p:.3f}",
        str(len(groups[0])),
    ]
    head = ["without (%)", f"with {PARTS} parts (%)", "difference", "95 % interval", "p", "pairs"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), cells))


def main(output: Path, flags: list[str], *, seeds: int, at_once: int = 1) -> None:
    """Seed by seed, so that an interrupted record is whole for the seeds that it has."""

    def tell(row: dict[str, Any]) -> None:
        say(f"{row['seconds']:5d} s  seed {row['seed']}, {row['parts']} parts: {row['correct']} of {row['total']}")

    rows = complete(
        output,
        list(product(range(seeds), (None, PARTS))),
        lambda which: trained(flags, seed=which[0], parts=which[1]),
        settings={"flags": [*SETTINGS, *flags]},
        tell=tell,
        at_once=at_once,
    )
    if seeds > 1:
        say(summary(rows))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train seeds with and without virtual replicas.")
    return with_seeds(parser, what="pairs of runs")


if __name__ == "__main__":
    run_script(parser(), main)
