"""Relations on the devices of a script, in its own precision: how far equal runs differ, and what that hides."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import run_here

from lit_cifar.checks.relations.child import _join
from lit_cifar.checks.relations.own_devices import OwnDevices, _round_otherwise, measure, of_trainer
from lit_cifar.checks.relations.plan import RunPlan, Target, Trace
from lit_cifar.checks.relations.runs import NotJudgedError, Runs

ROOT = Path(__file__).parents[1]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(Target(program="train.py", folder=""), RunPlan(double=False), tmp_path, limit_s=1)


@pytest.mark.parametrize(("spread", "digit", "most"), [(0, 0, 1e-3), (1e-3, 0, 1e-2), (0.03, 0, math.inf), (0, 0.5, 1)])
def test_a_limit_is_ten_times_the_spread_of_equal_runs(spread: float, digit: float, most: float, runs: Runs) -> None:
    runs.spread, runs.digit = {"weights/0": spread}, digit
    assert runs.limit_of("weights/0") == pytest.approx(most)
    assert bool(runs.apart({"weights/0": 1.0}, {"weights/0": 0.98}, ["weights/0"])) is (most < 0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_last_digit_is_changed_in_every_type(dtype: torch.dtype) -> None:
    changed, usual = torch.ones(900, dtype=dtype), torch.zeros(900, dtype=dtype)
    _round_otherwise(changed, 0.0, 1)
    _round_otherwise(usual, 0.0, 1, usual=1.0)
    digit = torch.finfo(dtype).eps
    assert (changed - 1).abs().max() == usual.abs().max() == digit
    assert 500 < int((changed != 1).sum()) < 700


@pytest.mark.parametrize(("apart", "says"), [(1e-4, "weights of equal runs differ by 0.0001$"), (0.1, "")])
def test_where_a_mistake_could_hide_nothing_is_judged(apart: float, says: str) -> None:
    traces = [Trace(state={"weights/0": 1.0, "weights/1": 1.0}, steps=9, parts={OwnDevices: OwnDevices({"cuda:0"})})]
    traces += [traces[0], Trace(state=dict.fromkeys(traces[0].state, 1.0 - apart))]
    runs: Any = SimpleNamespace(spread={}, own=lambda **asked: traces[2 * ("asks" in asked)])
    if says:
        assert re.search(says, measure(runs))
        return
    with pytest.raises(NotJudgedError, match=r"2 of 2 weights .* fewer --steps than 9"):
        measure(runs)


@pytest.mark.parametrize(
    ("gpus", "own", "is_gpu", "backend", "places"),
    [
        (2, "nccl", True, "nccl", {}),
        (2, None, True, None, {}),  # of which torch takes the usual one
        (1, "nccl", True, "gloo", {"devices": 1, "num_nodes": 2}),
        (0, "nccl", True, "gloo", {}),
        (2, "nccl", False, "gloo", {}),
    ],
)
def test_ranks_use_nccl_where_each_has_a_device(
    gpus: int, own: str | None, is_gpu: bool, backend: str, places: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **_: made.append(name))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    for name in ("spawn", "start_processes"):
        monkeypatch.setattr(torch.multiprocessing, name, lambda *_: None)
    plan = RunPlan(ranks=2, on_own_devices=is_gpu)
    watched: Any = SimpleNamespace(plan=plan, rank=0, trace=Trace())
    _join(watched)
    torch.distributed.init_process_group(backend=own)
    assert made == [backend]
    assert of_trainer(plan, {"accelerator": "gpu"}) == {"accelerator": "gpu"} | places


@pytest.mark.slow
def test_both_bugs_of_the_example_are_found_in_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_cifar.tools.relations.exit_orderly_when_terminated", lambda: None)
    words = ("--gpu", "--only=ranks,epochs", "--batches=4", "--steps=24")
    said = run_here("relations", ROOT / "examples" / "two_bugs.py", *words, check=False).stdout
    assert re.search(
        r"^PASS +run .* on cpu in its own precision, where weights of equal runs differ by ", said, flags=re.M
    )
    assert re.findall(r"^FAIL +(ranks|order of epochs) ", said, flags=re.M) == ["order of epochs", "ranks"]
