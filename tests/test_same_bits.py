"""`benchmarks/scripts/same_bits.py`: every mode is trained once in each precision, and a record is completed."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents import SCRIPTS

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.modes import Variant


def test_a_record_is_completed_with_the_runs_that_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import same_bits

    found: list[tuple[str, str, int]] = []

    def train(mode: Variant, precision: str, flags: list[str]) -> dict[str, Any]:
        found.append((precision, mode.name, mode.devices))
        return {"precision": precision, "mode": mode.name, "devices": mode.devices, "sha256": "0" * 64, "seconds": 1.0}

    monkeypatch.setattr(same_bits, "trained", train)
    output = tmp_path / "digests.json"
    same_bits.main(output, [], precisions=["32-true", "bf16-mixed"])
    assert len(found) == len(set(found)) == 30
    record = json.loads(output.read_text())
    del record["rows"][1::2]
    output.write_text(json.dumps(record))
    same_bits.main(output, [], precisions=["32-true", "bf16-mixed"])
    assert found[30:] == found[1:30:2]
    with pytest.raises(ConfigError, match="runs with other flags"):
        same_bits.main(output, ["--data.batch_size=32"], precisions=["32-true"])
