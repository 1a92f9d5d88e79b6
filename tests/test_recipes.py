"""`benchmarks/recipes.py`: every seed is trained and tested once, and a record that is there is continued."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from commands import TINY
from documents import ROOT


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import recipes

    return recipes


def row(seed: int, correct: int) -> dict[str, float]:
    return {"seed": seed, "correct": correct, "total": 100, "seconds": 3.0, "images_per_s": 10.0}


def test_mean_and_spread_over_the_seeds(recipes: ModuleType) -> None:
    assert recipes.summary([row(0, 94), row(1, 96)]) == "95.00 +- 1.41 %, n = 2, 3 s a run"
    assert recipes.summary([row(0, 94)]) == "94.00 %, n = 1, 3 s a run"


def test_a_record_is_continued_with_the_seeds_that_it_lacks(
    recipes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def trained(recipe: str, flags: list[str], *, seed: int) -> dict[str, float]:
        asked.append(seed)
        return row(seed, 90)

    monkeypatch.setattr(recipes, "trained", trained)
    recipes.main("fast94", tmp_path / "record.json", [], seeds=2)
    recipes.main("fast94", tmp_path / "record.json", [], seeds=3)
    assert asked == [0, 1, 2]
    assert [found["seed"] for found in json.loads((tmp_path / "record.json").read_text())["rows"]] == asked


@pytest.mark.slow
def test_a_recipe_is_trained_and_tested(recipes: ModuleType) -> None:
    found = recipes.trained("fast94", [*TINY, "--model.compile=false"], seed=3)
    assert (found["seed"], found["total"]) == (3, 100)
    assert found["images_per_s"] > 0
