"""Steps that train to the end. Their records stay in the folder of the visit, and a later visit continues them."""

import csv
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import recipes
import trials

from gpu_visit.processes import OutOfTimeError
from gpu_visit.step import Step

SHORT = ("fast_9_epochs", "muon_12_epochs")
LONG = ("muon_23_epochs", "muon_48_epochs")
_LIMIT_S = 1200.0
_SMALL = ["--data.dataset=synthetic", "--data.num_train=96", "--data.num_test=32", "--data.batch_size=16"]
_SMALL += ["--model.arch=tiny", "--model.stem=imagenet", "--model.compile=false", "--trainer.max_epochs=2"]
_SMALL += ["--trainer.precision=32-true"]
_BF16 = ["--trainer.precision=bf16-mixed", "--model.channels_last=true"]


def recipe_runs(these: Sequence[str], step: Step, *, seeds: range) -> None:
    """One after the other: they are timed. Seed by seed: when the time is over all recipes have as many."""
    for number in seeds if step.visit.on_gpu else seeds[:1]:
        for recipe in these if step.visit.on_gpu else these[:1]:
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


def default_run(step: Step) -> None:
    """`fit` as it is, and its test."""
    step.check("default recipe", partial(_default, step))


def articles_runs(step: Step) -> None:
    """In bf16-mixed and channels_last."""
    step.check("articles", partial(_articles, step))


def _default(step: Step) -> tuple[str, dict[str, Any]]:
    flags = _flags(step)
    run, test = step.run_folder("default"), step.run_folder("default-test")
    step.output_of("default", "lit_cifar", "fit", *flags, f"--run_dir={run}", limit_s=_LIMIT_S)
    for name in ("metrics.csv", "environment.json", "config.yaml"):
        (step.visit.out / f"default-{name}").write_bytes((run / name).read_bytes())
    chosen = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"
    step.output_of("default-test", "lit_cifar", "test", *_flags(step), chosen, f"--run_dir={test}")
    with (test / "per_rank.csv").open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["rank"] == "all")
    return f"{row['correct']} of {row['total']} test images right", {"flags": flags, **row}


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
