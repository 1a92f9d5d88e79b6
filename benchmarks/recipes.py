"""Train a recipe with several seeds and test each run: `python benchmarks/recipes.py fast94 OUTPUT [FLAGS]`.

FLAGS go to `fit`, e.g. `--data.root=/datasets`. All training images are trained on, and the test images are counted
once, after the last epoch. The results are written as JSON after every run; if OUTPUT is there already, only the seeds
that it lacks are trained.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from fit_and_test import fit_and_test

from lit_cifar.commands.terminal import about, say

RECIPES = Path(__file__).parents[1] / "configs" / "recipes"
TIMEOUT_S = 4 * 3600.0
THREADS = os.cpu_count() or 1


def trained(recipe: str, flags: list[str], *, seed: int) -> dict[str, Any]:
    """Train and test once.

    Returns:
        seed, correct and total (test images), seconds (of the whole command, with start and compiling) and images_per_s
        (of training alone: the median over windows of `log_every_n_steps`).
    """
    words = [f"--config={RECIPES / recipe}.yaml", f"--seed_everything={seed}", f"--data.seed={seed}", *flags]
    result = fit_and_test(words, threads=THREADS, timeout_s=TIMEOUT_S)
    speeds = result.logged("train/images_per_s")
    found = {"seed": seed, "correct": result.correct, "total": result.total, "seconds": round(result.seconds, 1)}
    return found | {"images_per_s": median(speeds) if speeds else None}


def summary(rows: list[dict[str, Any]]) -> str:
    """Mean accuracy, its standard deviation over the seeds, and the seconds of a run."""
    accuracies = [100 * row["correct"] / row["total"] for row in rows]
    spread = f" +- {stdev(accuracies):.2f}" if len(rows) > 1 else ""
    return f"{fmean(accuracies):.2f}{spread} %, n = {len(rows)}, {median(row['seconds'] for row in rows):.0f} s a run"


def main(recipe: str, output: Path, flags: list[str], *, seeds: int) -> None:
    record: dict[str, Any] = about() | {"recipe": recipe, "flags": flags, "rows": []}
    if output.exists():
        record = json.loads(output.read_text())
    for seed in range(len(record["rows"]), seeds):
        record["rows"].append(trained(recipe, flags, seed=seed))
        output.write_text(json.dumps(record, indent=1) + "\n")
        say(f"seed {seed}: {summary(record['rows'][-1:])}")
    say(summary(record["rows"]))


def parser() -> argparse.ArgumentParser:
    """The script's own arguments; the others go to `fit`."""
    parser = argparse.ArgumentParser(description="Train a recipe with several seeds and test each run.")
    parser.add_argument("recipe", choices=sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=5, help="runs")
    return parser


if __name__ == "__main__":
    arguments, rest = parser().parse_known_args()
    main(arguments.recipe, arguments.output, rest, seeds=arguments.seeds)
