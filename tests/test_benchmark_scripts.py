"""`benchmarks/scripts`: runs are trained with each seed or in each mode, and a record is continued where it ends."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import TINY
from documents import SCRIPTS, parser_of

from lit_cifar.errors import ConfigError

sys.path.insert(0, str(SCRIPTS))

import articles
import recipes
import run_record
import trials


def test_a_record_is_continued_with_the_cases_that_it_lacks(tmp_path: Path) -> None:
    output, settings = tmp_path / "record.json", {"flags": ["--data.batch_size=8"]}
    tried: list[int] = []
    told: list[dict[str, Any]] = []

    def train(case: int) -> dict[str, Any]:
        tried.append(case)
        if tried == [1, 2]:
            raise KeyboardInterrupt
        return {"case": case}

    with pytest.raises(KeyboardInterrupt):
        run_record.complete(output, [1, 2], train, settings=settings, tell=told.append)
    assert json.loads(output.read_text())["rows"] == [{"case": 1}]
    rows = run_record.complete(output, [1, 2, 3], train, settings=settings, tell=told.append, at_once=2)
    assert sorted(tried) == [1, 2, 2, 3]
    assert rows == told == json.loads(output.read_text())["rows"] == [{"case": 1}, {"case": 2}, {"case": 3}]
    assert json.loads(output.read_text())["flags"] == settings["flags"]
    with pytest.raises(ConfigError, match=r"record\.json has been made with other flags\n.*name a new file"):
        run_record.complete(output, [1, 2], train, settings={"flags": ["--x"]}, tell=print)


def recipe_row(seed: int, correct: int, *, at_once: int = 1) -> dict[str, float]:
    found = {"seed": seed, "correct": correct, "correct_flipped": correct + 1, "total": 100}
    return found | {"train_s": 3.0, "at_once": at_once}


def test_a_recipe_s_mean_over_the_seeds() -> None:
    both = recipes.summary([recipe_row(0, 94), recipe_row(1, 96, at_once=2) | {"train_s": 9.0}])
    assert both == "95.00 +- 1.41 %, with flips 96.00 +- 1.41 %, n = 2, 3.0 s of training"
    assert recipes.summary([recipe_row(0, 94, at_once=2)]) == "94.00 %, with flips 95.00 %, n = 1"


def test_the_first_seed_of_a_recipe_is_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its time is its own."""
    asked: list[tuple[int, int]] = []

    def trained(recipe: str, flags: list[str], *, seed: int, at_once: int) -> dict[str, float]:
        asked.append((seed, at_once))
        return recipe_row(seed, 90, at_once=at_once)

    monkeypatch.setattr(recipes, "trained", trained)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    recipes.main("muon_12_epochs", tmp_path / "record.json", [], seeds=3, at_once=2)
    assert sorted(asked) == [(0, 1), (1, 2), (2, 2)]


def test_every_trial_is_the_recipe_with_other_settings() -> None:
    parser = parser_of("fit")
    for name, these in trials.TRIALS.items():
        files = [] if name == "default" else [f"--config={recipes.RECIPES / name}.yaml"]
        recipe, *others = [parser.parse_args(["fit", *files, *flags]).fit for flags in these.values()]
        assert these["the recipe"] == []
        assert recipe not in others
    every = others[-1]
    assert (every.data.batch_size, every.data.small_size, every.data.reflect, every.data.alternate_flips) == (
        *(2000, 24, True, True),
    )
    assert (every.model.optimizer.init_args.lr, every.model.optimizer.init_args.momentum) == (0.24, 0.6)
    assert every.model.optimizer.init_args.lr_others == recipe.model.optimizer.init_args.lr_others
    assert every.model.lr_scheduler.init_args.warmup == 0


def test_a_trial_is_compared_with_the_recipe_of_the_same_seed() -> None:
    def row(trial: str, seed: int, correct: int) -> dict[str, Any]:
        counts = {"correct_flipped": correct, "correct_six_views": correct + 1, "total": 1000}
        return {"trial": trial, "seed": seed, "train_s": 20.0} | counts

    rows = [row("the recipe", 0, 900), row("momentum 0.6", 0, 910), row("the recipe", 1, 940)]
    assert trials.summary(rows).splitlines() == [
        "the recipe: 2 views 92.00 % (+0.00), 6 views 92.10 % (+0.00), 20.0 s, n = 2",
        "momentum 0.6: 2 views 91.00 % (+1.00), 6 views 91.10 % (+1.00), 20.0 s, n = 1",
    ]


@pytest.mark.slow
def test_a_recipe_and_a_case_of_the_articles_are_trained_and_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    found = recipes.trained("muon_12_epochs", [*TINY, "--model.compile=false", "--trainer.max_epochs=3"], seed=3)
    assert (found["seed"], found["total"], found["epochs"]) == (3, 100, 3)
    # The first epoch and the last count as usual ones.
    assert found["train_s"] == pytest.approx(3 * found["epoch_s"], abs=0.01)
    found = articles.trained(articles.CASES[4], [*TINY, "--trainer.max_epochs=2"], seed=1)
    assert (found["num_gpus"], found["seed"], found["total"], len(found["losses"])) == (2, 1, 100, 2)


def test_the_cases_are_the_configurations_of_the_articles() -> None:
    """On one device: global batch, parts of BatchNorm, order and momentum."""
    found = {}
    for case in articles.CASES:
        config = parser_of("fit").parse_args(["fit", *case.flags]).fit
        settings = config.model.optimizer.init_args
        parts = config.model.ghost_batchnorm.data_parallel_size if config.model.ghost_batchnorm else 1
        order = "frozen" if config.data.frozen_order else "new"
        found[case.name] = (config.data.batch_size, parts, order, settings.nesterov, settings.weight_decay)
    assert found == {
        "one device": (128, 1, "new", False, 0.0),
        "one device, Nesterov momentum, weight decay 5e-4": (128, 1, "new", True, 5e-4),
        "dp, 2 GPUs": (128, 2, "new", False, 0.0),
        "ddp, 2 GPUs": (256, 2, "new", False, 0.0),
        "ddp, 2 GPUs, without set_epoch": (256, 2, "frozen", False, 0.0),
        "ddp, 4 GPUs": (512, 4, "new", False, 0.0),
        "ddp, 4 GPUs, without set_epoch": (512, 4, "frozen", False, 0.0),
    }
