"""`benchmarks/scripts/recipes.py`: every seed is trained and tested once, and a record that is there is continued."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from commands import TINY
from documents import SCRIPTS


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import recipes

    return recipes


def row(seed: int, correct: int, *, at_once: int = 1) -> dict[str, float]:
    found = {"seed": seed, "correct": correct, "correct_flipped": correct + 1, "total": 100}
    return found | {"train_s": 3.0, "at_once": at_once}


def test_mean_and_spread_over_the_seeds(recipes: ModuleType) -> None:
    both = recipes.summary([row(0, 94), row(1, 96, at_once=2) | {"train_s": 9.0}])
    assert both == "95.00 +- 1.41 %, with flips 96.00 +- 1.41 %, n = 2, 3.0 s of training"
    assert recipes.summary([row(0, 94, at_once=2)]) == "94.00 %, with flips 95.00 %, n = 1"


def test_a_record_is_continued_with_the_seeds_that_it_lacks(
    recipes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one alone, so that its time is its own."""
    asked: list[tuple[int, int]] = []

    def trained(recipe: str, flags: list[str], *, seed: int, at_once: int) -> dict[str, float]:
        asked.append((seed, at_once))
        return row(seed, 90, at_once=at_once)

    monkeypatch.setattr(recipes, "trained", trained)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    recipes.main("fast94", tmp_path / "record.json", [], seeds=2, at_once=2)
    recipes.main("fast94", tmp_path / "record.json", [], seeds=4, at_once=2)
    assert sorted(asked) == [(0, 1), (1, 2), (2, 2), (3, 2)]
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [found["seed"] for found in rows] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_recipe_is_trained_and_tested(recipes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    found = recipes.trained("fast94", [*TINY, "--model.compile=false", "--trainer.max_epochs=3"], seed=3)
    assert (found["seed"], found["total"], found["epochs"]) == (3, 100, 3)
    # The first epoch and the last count as usual ones.
    assert found["train_s"] == pytest.approx(3 * found["epoch_s"], abs=0.01)
