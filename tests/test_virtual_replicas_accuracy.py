"""`benchmarks/virtual_replicas_accuracy.py`: pairs of runs, and what their difference says."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import ROOT


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import virtual_replicas_accuracy

    return virtual_replicas_accuracy


def row(seed: int, parts: int | None, correct: int) -> dict[str, Any]:
    return {"seed": seed, "parts": parts, "correct": correct, "total": 1000, "seconds": 3}


def test_pairs_are_those_of_a_seed(accuracy: ModuleType) -> None:
    rows = [row(0, None, 600), row(0, 4, 590), row(1, 4, 610), row(1, None, 640), row(2, None, 620), row(2, 4, 600)]
    last = accuracy.summary(rows).splitlines()[-1]
    # Differences of -1, -3 and -2; Student's t with two degrees of freedom is 4.303 at 97.5 %.
    assert last == "| 62.00 +- 2.00 | 60.00 +- 1.00 | -2.00 | -4.48 to +0.48 | 0.074 | 3 |"


def test_a_record_is_continued_with_the_runs_that_it_lacks(
    accuracy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int | None]] = []

    def trained(flags: list[str], *, seed: int, parts: int | None) -> dict[str, Any]:
        asked.append((seed, parts))
        if asked == [(0, None), (0, 4)]:
            raise KeyboardInterrupt
        return row(seed, parts, 600 + 10 * seed * (parts or 1))

    monkeypatch.setattr(accuracy, "trained", trained)
    with pytest.raises(KeyboardInterrupt):
        accuracy.main(tmp_path / "record.json", [], seeds=1)
    accuracy.main(tmp_path / "record.json", [], seeds=2)
    assert asked == [(0, None), (0, 4), (0, 4), (1, None), (1, 4)]
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [(found["seed"], found["parts"]) for found in rows] == [(0, None), (0, 4), (1, None), (1, 4)]


def test_both_runs_of_a_pair_differ_in_the_option_alone(accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fit_and_test(words: list[str], *, timeout_s: float) -> Any:
        asked.append(words)
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy, "fit_and_test", fit_and_test)
    for parts in (None, 4):
        with pytest.raises(KeyboardInterrupt):
            accuracy.trained(["--data.root=/datasets"], seed=3, parts=parts)
    assert {"--seed_everything=3", "--data.seed=3", "--data.root=/datasets"} < set(asked[0])
    assert asked[1] == [*asked[0], "--virtual_replicas=4"]
