"""Train all runs of the articles with several seeds, and test each: `benchmarks/scripts/articles.py OUTPUT [FLAGS]`.

Each run is 15 epochs of all training images in one process. `--model.ghost_batchnorm` normalises its batch in as many
parts as the articles have GPUs, so that it computes what `dp` and `ddp` compute on them. FLAGS go to `fit`, e.g.
`--data.root=/datasets`. The results are written as JSON after every run; if OUTPUT is there already, only what it lacks
is trained.
"""

import argparse
import os
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fit_and_test import fit_and_test
from run_record import complete, run_script, with_seeds

from lit_cifar.tools.terminal import say

CONFIGS = Path(__file__).parents[2] / "configs" / "reproduce"
TIMEOUT_S = 24 * 3600.0
SETTINGS = ["--trainer.enable_progress_bar=false", "--figures.every_n_epochs=0", "--last_checkpoint.every_n_epochs=0"]


@dataclass(frozen=True)
class Case:
    """A run of the articles, and what they print of its test accuracy."""

    name: str
    printed: str
    batch_size: int = 128
    num_gpus: int = 1
    set_epoch: bool = True
    momentum: str = "plain"

    @property
    def flags(self) -> list[str]:
        files = ["single", *(["plain_momentum"] if self.momentum == "plain" else [])]
        flags = [f"--config={CONFIGS / name}.yaml" for name in files]
        flags += [f"--data.batch_size={self.batch_size}", f"--data.order.frozen={str(not self.set_epoch).lower()}"]
        return flags + ([f"--model.ghost_batchnorm.data_parallel_size={self.num_gpus}"] if self.num_gpus > 1 else [])


CASES = [
    Case("one device", "74.79 to 76.04"),
    Case("one device, Nesterov momentum, weight decay 5e-4", "74.79 to 76.04", momentum="Nesterov"),
    Case("dp, 2 GPUs", "74.79", num_gpus=2),
    Case("ddp, 2 GPUs", "70.12, 71.29, 74.25 to 76.04", batch_size=256, num_gpus=2),
    Case("ddp, 2 GPUs, without set_epoch", "72.34 to 74.99", batch_size=256, num_gpus=2, set_epoch=False),
    Case("ddp, 4 GPUs", "76.12", batch_size=512, num_gpus=4),
    Case("ddp, 4 GPUs, without set_epoch", "72.33", batch_size=512, num_gpus=4, set_epoch=False),
]


def trained(case: Case, flags: list[str], *, seed: int, at_once: int = 1) -> dict[str, Any]:
    """Train and test once."""
    words = [*case.flags, *SETTINGS, f"--seed_everything={seed}", f"--data.seed={seed}", *flags]
    threads = max(1, len(os.sched_getaffinity(0)) // at_once)
    result = fit_and_test(words, threads=threads, limit_s=TIMEOUT_S)
    found = {"losses": result.logged("train/loss"), "correct": result.correct, "total": result.total}
    return asdict(case) | {"seed": seed} | found | {"seconds": round(result.seconds)}


def summary(rows: list[dict[str, Any]]) -> str:
    """For each case the printed accuracy in %, the mean of ours with its standard deviation, and the last loss."""
    lines = ["| run | printed (%) | ours (%) | loss of the last epoch | n |", "|---|---|---|---|---|"]
    for case in CASES:
        own = [row for row in rows if row["name"] == case.name]
        if own:
            accuracies = [100 * row["correct"] / row["total"] for row in own]
            spread = f" +- {stdev(accuracies):.2f}" if len(own) > 1 else ""
            cells = [case.name, case.printed, f"{fmean(accuracies):.2f}{spread}"]
            cells += [f"{fmean(row['losses'][-1] for row in own):.3f}", str(len(own))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(output: Path, flags: list[str], *, seeds: int, at_once: int = 1) -> None:
    """Seed by seed, so that an interrupted record is whole for the seeds that it has."""

    def tell(row: dict[str, Any]) -> None:
        say(f"{row['seconds']:5d} s  seed {row['seed']}, {row['name']}: {row['correct']} of {row['total']}")

    rows = complete(
        output,
        list(product(range(seeds), CASES)),
        lambda which: trained(which[1], flags, seed=which[0], at_once=at_once),
        settings={"flags": [*SETTINGS, *flags]},
        tell=tell,
        at_once=at_once,
    )
    say(summary(rows))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train all runs of the articles with several seeds, and test each.")
    return with_seeds(parser, what="runs of each kind")


if __name__ == "__main__":
    run_script(parser(), main)
