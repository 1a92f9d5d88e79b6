"""Train a recipe with several seeds and test each run: `python benchmarks/scripts/recipes.py RECIPE OUTPUT [FLAGS]`.

FLAGS go to `fit`, e.g. `--data.root=/datasets`. All training images are trained on, and the test images are counted
twice after the last epoch: as they are, and with their mirror images. The results are written as JSON after every run;
if OUTPUT is there already, only the seeds that it lacks are trained.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Literal

from fit_and_test import fit_and_test
from run_record import complete, run_script, with_seeds

from lit_cifar.tools.terminal import say

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "configs" / "recipes"
TIMEOUT_S = 4 * 3600.0
THREADS = len(os.sched_getaffinity(0))
_WHOLE = ["--model.compile=false", "--trainer.limit_val_batches=1.0"]  # also if the training did not validate
COUNTS = {"correct": 1, "correct_flipped": 2}  # of the tests, in their order, with so many views of each image


def trained(
    recipe: str,
    flags: list[str],
    *,
    seed: int,
    at_once: int = 1,
    split: Literal["val", "test"] = "test",
) -> dict[str, Any]:
    """Train once, and evaluate with so many views of each image as `COUNTS` says.

    Returns:
        seed; total, and by the names in `COUNTS` how many of these are right; epochs; each_s (of each epoch); epoch_s
        (median of an epoch, checkpoint included); train_s (all epochs, without compiling and without the last saving);
        compile_s (what the first epoch took longer); seconds (of the whole command); at_once (runs at that time).
    """
    with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
        clock = Path(folder) / "epochs.json"
        words = [f"--config={RECIPES / recipe}.yaml", f"--seed_everything={seed}", f"--data.seed={seed}", *flags]
        words += ["--trainer.callbacks+=epoch_clock.EpochClock", f"--trainer.callbacks.path={clock}"]
        tests = [[*_WHOLE, f"--model.test_views={views}"] for views in COUNTS.values()]
        threads = max(1, THREADS // at_once)
        result = fit_and_test(words, tests=tests, split=split, threads=threads, limit_s=TIMEOUT_S)
        timed = json.loads(clock.read_text())
    epochs, usual = timed["epochs"], timed["median"]
    inner = [epoch["total_s"] for epoch in epochs[1:-1]]
    return {
        "seed": seed,
        "total": result.total,
        **{name: correct for name, (correct, _) in zip(COUNTS, result.counts, strict=True)},
        "epochs": len(epochs),
        "each_s": [round(epoch["total_s"], 3) for epoch in epochs],
        "epoch_s": round(usual["total_s"], 3),
        "train_s": round(sum(inner) + usual["total_s"] * (len(epochs) - len(inner)), 2),
        "compile_s": round(epochs[0]["training_s"] - usual["training_s"], 1),
        "seconds": round(result.seconds, 1),
        "peak_mib": round(timed["peak_mib"]),
        "at_once": at_once,
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Mean accuracy without and with mirror images, its standard deviation over the seeds, and the training time."""
    shown = ", with flips ".join(_spread([100 * row[key] / row["total"] for row in rows]) for key in COUNTS)
    alone = [row["train_s"] for row in rows if row["at_once"] == 1]
    return f"{shown}, n = {len(rows)}" + (f", {median(alone):.1f} s of training" if alone else "")


def _spread(accuracies: list[float]) -> str:
    return f"{fmean(accuracies):.2f}" + (f" +- {stdev(accuracies):.2f} %" if len(accuracies) > 1 else " %")


def prepare() -> None:
    """Let processes find the callbacks in this folder, and the kernels that one of them has compiled."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/compiled-recipes")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))


def main(recipe: str, output: Path, flags: list[str], *, seeds: int, at_once: int = 1) -> None:
    """The first seed alone, so that its time is its own."""
    prepare()

    def complete_up_to(seeds: int, *, at_once: int) -> list[dict[str, Any]]:
        return complete(
            output,
            range(seeds),
            lambda seed: trained(recipe, flags, seed=seed, at_once=at_once),
            settings={"recipe": recipe, "flags": flags},
            tell=lambda row: say(f"seed {row['seed']}: {summary([row])}"),
            at_once=at_once,
        )

    complete_up_to(1, at_once=1)
    rows = complete_up_to(seeds, at_once=at_once)
    say(summary(rows))


def parser() -> argparse.ArgumentParser:
    """The first seed is timed alone."""
    parser = argparse.ArgumentParser(description="Train a recipe with several seeds and test each run.")
    parser.add_argument("recipe", choices=sorted(path.stem for path in RECIPES.glob("*.yaml")))
    return with_seeds(parser, what="runs")


if __name__ == "__main__":
    run_script(parser(), main)
