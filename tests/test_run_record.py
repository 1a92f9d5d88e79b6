"""`benchmarks/scripts/run_record.py`: a record is continued where it ends, and never mixes settings."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import SCRIPTS

from lit_cifar.errors import ConfigError


@pytest.fixture
def run_record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import run_record

    return run_record


def test_a_record_is_continued_with_the_cases_that_it_lacks(run_record: ModuleType, tmp_path: Path) -> None:
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


def test_a_record_with_other_settings_is_refused(run_record: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    run_record.complete(output, [1], lambda case: {"case": case}, settings={"flags": []}, tell=print)
    before = output.read_text()
    with pytest.raises(ConfigError, match=r"record\.json has been made with other flags\n.*name a new file"):
        run_record.complete(output, [1, 2], lambda case: {"case": case}, settings={"flags": ["--x"]}, tell=print)
    assert output.read_text() == before


@pytest.mark.parametrize("script", ["articles", "shuffling", "virtual_replicas_accuracy"])
def test_a_script_refuses_in_words(script: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"flags": [], "rows": []}')
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), str(record), "--data.batch_size=8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lit_cifar: error: {record} has been made with other flags\n")
    assert len(done.stderr.splitlines()) <= 5
