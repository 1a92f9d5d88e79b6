"""Steps that train to the end. Their records stay in the folder of the visit, and a later visit continues them."""

import csv
import json
import time
from functools import partial
from statistics import median
from typing import Any

import recipes
import trials

from gpu_visit.compare import logged
from gpu_visit.processes import OutOfTimeError
from gpu_visit.step import Step

_LIMIT_S = 1200.0
_SMALL = ["--data.dataset=synthetic", "--data.num_train=96", "--data.num_test=32", "--data.batch_size=16"]
_SMALL += ["--model.arch=tiny", "--model.stem=imagenet", "--model.compile=false", "--trainer.max_epochs=2"]
_SMALL += ["--trainer.precision=32-true"]
_BF16 = ["--trainer.precision=bf16-mixed", "--model.channels_last=true"]


def recipe_runs(recipe: str, step: Step, *, seeds: int) -> None:
    """One after the other: they are timed."""
    for number in range(1, seeds + 1) if step.visit.on_gpu else [1]:
        step.check(f"{recipe}, n = {number}", partial(_recipe, step, recipe, number))


def _recipe(step: Step, recipe: str, seeds: int) -> tuple[str, dict[str, Any]]:
    rows = _record(step, f"recipe-{recipe}", "recipes", recipe, f"--seeds={seeds}", *_flags(step))
    return recipes.summary(rows), {"rows": rows}


def trials_of_recipe(step: Step) -> None:
    """On held-out images, seed by seed; in the small size the recipe, and all changes of it at once."""

    def check() -> tuple[str, dict[str, Any]]:
        size = ["--seeds=3"]
        if not step.visit.on_gpu:
            size = ["--seeds=1", "--only=the recipe", "--only=all of these", "--data.val_size=16"]
        rows = _record(step, "trials", "trials", *_flags(step), *size)
        return trials.summary(rows).replace("\n", "; "), {"rows": rows}

    step.check("trials", check)


def default_runs(step: Step) -> None:
    """`fit` as it is, and its test."""
    for seed in range(3) if step.visit.on_gpu else [0]:
        step.check(f"default recipe, seed {seed}", partial(_default, step, seed))


def articles_runs(step: Step) -> None:
    """In bf16-mixed and channels_last."""
    step.check("articles", partial(_articles, step))


def _default(step: Step, seed: int) -> tuple[str, dict[str, Any]]:
    """Right images of the test, the seconds of the whole command, and images a second of an epoch but the first."""
    flags = [*_flags(step), f"--seed_everything={seed}", f"--data.seed={seed}"]
    name = f"default-{seed}"
    run, test = step.run_folder(name), step.run_folder(f"{name}-test")
    begun = time.monotonic()
    step.output_of(name, "lit_cifar", "fit", *flags, f"--run_dir={run}", limit_s=_LIMIT_S)
    seconds = time.monotonic() - begun
    (step.visit.out / f"{name}-metrics.csv").write_bytes((run / "metrics.csv").read_bytes())
    chosen = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"
    step.output_of(f"{name}-test", "lit_cifar", "test", *flags, chosen, f"--run_dir={test}")
    with (test / "per_rank.csv").open(newline="") as table:
        (row,) = (row for row in csv.DictReader(table) if row["rank"] == "all")
    speeds = [*logged(run, "train/images_per_s").values()]
    speed = median(speeds[len(speeds) // 10 :])
    found = {"flags": flags, "seconds": seconds, "images_per_s": speed, **row}
    return f"{row['correct']} of {row['total']} test images right, {seconds:.1f} s, {speed:,.0f} images/s", found


def _articles(step: Step) -> tuple[str, dict[str, Any]]:
    flags = [f"--at_once={min(4, step.visit.jobs)}", *_flags(step), *(_BF16 if step.visit.on_gpu else [])]
    rows = _record(step, "articles", "articles", "--seeds=1", *flags)
    shown = [f"{row['name']}: {100 * row['correct'] / row['total']:.2f} % (printed {row['printed']})" for row in rows]
    return "; ".join(shown), {"rows": rows}


def _flags(step: Step) -> list[str]:
    """The device, and CIFAR-10 or as many images without it; in the small size a few."""
    made = ["--data.dataset=synthetic", "--data.num_train=50000", "--data.num_test=10000"]
    images = (step.visit.data or made) if step.visit.on_gpu else _SMALL
    device = [f"--trainer.accelerator={step.visit.accelerator}", "--trainer.devices=1"]
    return ["--trainer.enable_progress_bar=false", *device, *images]


def _record(step: Step, name: str, script: str, *words: str) -> list[dict[str, Any]]:
    """What a script of the folder above has written to `name.json`, in this visit and before."""
    file = step.visit.out / f"{name}.json"
    try:
        step.output_of(name, script, *words, str(file), limit_s=_LIMIT_S)
    except OutOfTimeError:
        there = len(json.loads(file.read_text())["rows"]) if file.exists() else 0
        raise OutOfTimeError(f"no time is left for it; {file.name} has {there} runs") from None
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows
