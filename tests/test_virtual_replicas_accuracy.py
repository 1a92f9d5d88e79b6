"""`benchmarks/scripts/virtual_replicas_accuracy.py`: pairs of runs, and what their difference says."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents import SCRIPTS


def row(seed: int, parts: int | None, correct: int) -> dict[str, Any]:
    return {"seed": seed, "parts": parts, "correct": correct, "total": 1000, "seconds": 3}


def test_pairs_are_those_of_a_seed_and_a_record_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import virtual_replicas_accuracy as accuracy

    rows = [row(0, None, 600), row(0, 4, 590), row(1, 4, 610), row(1, None, 640), row(2, None, 620), row(2, 4, 600)]
    last = accuracy.summary(rows).splitlines()[-1]
    # Differences of -1, -3 and -2; Student's t with two degrees of freedom is 4.303 at 97.5 %.
    assert last == "| 62.00 +- 2.00 | 60.00 +- 1.00 | -2.00 | -4.48 to +0.48 | 0.074 | 3 |"
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
    found = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [(each["seed"], each["parts"]) for each in found] == [(0, None), (0, 4), (1, None), (1, 4)]
