"""`benchmarks/same_bits.py`: every mode is trained once in each precision, and a record that is there is completed."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import ROOT

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.modes import Variant


@pytest.fixture
def same_bits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import same_bits

    return same_bits


@pytest.fixture
def trained(same_bits: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """What is trained, in place of training it."""
    found: list[tuple[str, str, int]] = []

    def train(mode: Variant, precision: str, flags: list[str]) -> dict[str, Any]:
        found.append((precision, mode.name, mode.devices))
        return {"precision": precision, "mode": mode.name, "devices": mode.devices, "sha256": "0" * 64, "seconds": 1.0}

    monkeypatch.setattr(same_bits, "trained", train)
    return found


def test_a_record_is_completed_with_the_runs_that_it_lacks(
    same_bits: ModuleType, trained: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    output = tmp_path / "digests.json"
    same_bits.main(output, [], precisions=["32-true", "bf16-mixed"])
    assert len(trained) == len(set(trained)) == 30
    record = json.loads(output.read_text())
    del record["rows"][1::2]
    output.write_text(json.dumps(record))
    same_bits.main(output, [], precisions=["32-true", "bf16-mixed"])
    assert trained[30:] == trained[1:30:2]


@pytest.mark.usefixtures("trained")
def test_runs_with_other_flags_are_not_mixed(same_bits: ModuleType, tmp_path: Path) -> None:
    same_bits.main(tmp_path / "digests.json", [], precisions=["32-true"])
    with pytest.raises(ConfigError, match="runs with other flags"):
        same_bits.main(tmp_path / "digests.json", ["--data.batch_size=32"], precisions=["32-true"])
