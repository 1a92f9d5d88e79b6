"""`python -m lit_cifar bench`: what is timed in turn, the sections and their rows, the trace of a step, the command."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import graded, refused, run_here
from PIL import Image
from short_fits import data, fit, short
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lit_cifar import LitResNet
from lit_cifar.errors import ConfigError
from lit_cifar.tools import bench
from lit_cifar.tools.bench import Row, Settings, command, interleaved, mode_speed, overhead
from lit_cifar.tools.bench.overhead import COUNTERS, InTurn, PlainLoop, Small
from lit_cifar.tools.bench.step_trace import STAGE, STEP
from lit_cifar.tools.bench.trace import RankStep, chrome_trace, draw, on_one_clock


def test_things_are_timed_in_turn_and_every_other_round_backwards() -> None:
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name) or float(len(called))) for name in "ab"}
    found = interleaved(calls, rounds=3)
    assert called == [*"ab", *"ba", *"ab"]
    assert {name: values.tolist() for name, values in found.items()} == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_three_digits_and_the_unit() -> None:
    values = [(0.9168, "x"), (34567.0, "img/s"), (250.0, "us"), (7.0, "s")]
    assert [command.shown(*each) for each in values] == ["0.917x", "34,600 img/s", "250 us", "7.00 s"]  # type: ignore[arg-type]


# The sections --------------------------------------------------------------------------------------------------------


@short
@pytest.mark.parametrize("compiles", [False, True])
def test_the_plain_loop_computes_what_fit_computes(
    tmp_path: Path, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be no measure: the same weights, bit for bit, and the same mean loss; compiled if `fit` is."""
    made: list[nn.Module] = []
    monkeypatch.setattr(overhead, "Compiled", lambda network, **_: made.append(network) or network)
    network, twin = Small(), Small()
    twin.load_state_dict(network.state_dict())
    schedule = {"lr_scheduler": lambda optimizer: StepLR(optimizer, 1000)}
    module = LitResNet(network=network, optimizer=lambda params: SGD(params, lr=0.1), label_smoothing=0.2, **schedule)
    module.compiles = compiles
    images = data()
    images.setup("fit")
    precision = SimpleNamespace(forward_context=nullcontext)
    settings = SimpleNamespace(precision_plugin=precision, log_every_n_steps=2, datamodule=images)
    loop = PlainLoop(twin, settings, module)
    loop.run(2)
    module.compiles = False
    trainer = fit(module, tmp_path)
    assert made == ([twin] if compiles else [])
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), twin.parameters(), strict=True))
    ((loss, accuracy),) = loop.logged
    assert loss == pytest.approx(float(trainer.callback_metrics["train/loss"]))
    assert accuracy == pytest.approx(float(trainer.callback_metrics["train/acc"]))


@short
def test_turns_go_on_in_the_next_epoch(tmp_path: Path) -> None:
    """Of 3 turns of 3 steps in each of 3 epochs the first two are not timed."""
    both = InTurn(str(tmp_path / "turns.json"), steps=3)
    sizes = {"num_train": 88, "batch_size": 8}
    fit(LitResNet(network=Small()), tmp_path, data(**sizes), callbacks=[both], max_epochs=3, log_every_n_steps=3)
    found = json.loads((tmp_path / "turns.json").read_text())
    assert [ours > 0 and plain > 0 for ours, plain in found["turns"]] == [True] * 7
    assert all(count > 0 for counts in found["counts"].values() for count in counts)


ROWS = {  # rounds, units, and between what the values of the last row lie
    "overhead": (2, ["us", *["x"] * 7], 0, 100),
    "mode_speed": (1, [*["x"] * 6, "img/s"] * 2, 0, math.inf),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("section", graded("overhead", slow=["mode_speed"]))
def test_rows_of_a_section(section: str, tmp_path: Path) -> None:
    rounds, units, low, high = ROWS[section]
    rows = getattr(bench, section).measure(Settings(folder=tmp_path, rounds=rounds, small=True))
    assert [row.unit for row in rows] == units
    counts = {row.name: row.values for row in rows if row.name.startswith(tuple(COUNTERS))}
    assert all(len(row.values) == (1 if row.name in counts else rounds) and (row.values > 0).all() for row in rows)
    assert all(low < value < high for value in rows[-1].values)
    for name, (ratio,) in counts.items():
        assert 1 < ratio < (1.05 if name.startswith("operators") else 2), name


def test_a_speed_is_measured_and_a_fit_that_fails_is_named(tmp_path: Path) -> None:
    settings = Settings(folder=tmp_path, small=True)
    assert mode_speed.speed_of_mode("auto", "imagenet", 8, settings) > 0
    with pytest.raises(ConfigError, match="2 replicas"):
        mode_speed.speed_of_mode("ddp", "imagenet", 7, settings)


@pytest.mark.parametrize(("words", "sections"), [(["modes"], ["modes"]), ([], ["overhead", "modes"])])
def test_the_command_prints_and_writes_what_was_measured(
    words: list[str], sections: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_row(settings: Settings) -> list[Row]:
        assert settings.folder.is_dir()
        return [Row("a [b] against c", "x", np.array([5.0, 1.0, 2.0, 4.0, float(settings.rounds)]), note="a note")]

    monkeypatch.setattr(command, "SECTIONS", {"overhead": one_row, "modes": one_row})
    done = run_here("bench", *words, "--rounds=3", f"--json={tmp_path / 'bench.json'}")
    shown = [line.strip() for line in done.stdout.splitlines() if "a [b] against c" in line or "a note" in line]
    assert [line.split("  ")[-1].strip() for line in shown] == ["3.00x", "2.00x to 4.00x, n = 5"] * len(sections)
    content = json.loads((tmp_path / "bench.json").read_text())
    assert [row["section"] for row in content["rows"]] == sections
    for row in content["rows"]:
        assert (row["low"], row["median"], row["high"], row["values"]) == (2.0, 3.0, 4.0, [5.0, 1.0, 2.0, 4.0, 3.0])
    assert {"versions", "cpu", "git", "command"} <= set(content)


# The trace of a step -------------------------------------------------------------------------------------------------


def event(name: str, start: float, duration: float, *, thread: Any = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration, "tid": thread, "pid": 99}


def rank_step(*events: dict[str, Any]) -> RankStep:
    return RankStep(rank=0, start=0.0, end=100.0, events=list(events))


COLLECTIVE = event("gloo:all_gather", 20, 60, thread=7, cat="user_annotation")
STEPS = {
    "operators within others count once, and Python is host": (
        [
            event("Optimizer.step", 0, 90, cat="user_annotation"),
            event("aten::conv2d", 10, 20),
            event("aten::convolution", 12, 15),
            event("ConvolutionBackward0", 40, 30),  # what it computes are operators again
            event("aten::convolution_backward", 45, 10),
        ],
        [(10, 30), (45, 55)],
        [],
    ),
    "a collective is no compute even while it copies": (
        [
            event("aten::add", 0, 30),
            COLLECTIVE,
            event("aten::copy_", 40, 30, thread=7),
            event("c10d::allreduce_", 35, 50),
        ],
        [(0, 30)],
        [(20, 80)],
    ),
    "messages are noted in the computing thread": (
        [event("gloo:recv", 10, 40, cat="user_annotation"), event("aten::mm", 20, 10)],
        [(20, 30)],
        [(10, 50)],
    ),
    "on a GPU kernels count, and not the operators that queue them": (
        [
            event("aten::conv2d", 0, 100),
            event("conv_kernel", 30, 40, thread="stream 7", cat="kernel"),
            event("ncclDevKernel_AllReduce", 50, 40, thread="stream 20", cat="kernel"),
            event("Memcpy PtoP", 95, 5, thread="stream 7", cat="gpu_memcpy"),
        ],
        [(30, 70)],
        [(50, 90), (95, 100)],
    ),
    "what began before the end is cut there": ([event("aten::add", 90, 50)], [(90, 100)], []),
}


@pytest.mark.parametrize(("events", "compute", "communication"), STEPS.values(), ids=STEPS)
def test_compute_and_communication(events: list[Any], compute: list[Any], communication: list[Any]) -> None:
    found = rank_step(*events)
    assert (found.compute, found.communication) == (compute, communication)
    assert sum(found.shares_ms.values()) == pytest.approx(0.1)


def test_the_shares_of_a_step() -> None:
    found = rank_step(event("aten::add", 0, 30), COLLECTIVE).shares_ms
    assert found == pytest.approx({"compute": 0.02, "overlapped": 0.01, "waiting": 0.05, "host": 0.02})
    in_turn = [event(name, 0.3 * i, 0.1) for i, name in enumerate(["aten::add", "gloo:send"] * 4)]
    assert str(rank_step(*in_turn).shares_ms["overlapped"]) == "0.0"  # not -0.0 by rounding


def test_ranks_have_one_clock_in_the_trace_and_a_row_each_in_the_picture() -> None:
    own, late = event(STEP, 6000, 500, cat="user_annotation"), event(STEP, 6200, 600, cat="user_annotation")
    stage = event("F0", 6400, 100, thread="stage 1", cat=STAGE)
    events = (
        [own, event("aten::add", 6200, 100)],
        [late, event("aten::mul", 6150, 10), stage, event("aten::add", 6400, 100)],
    )
    ranks = on_one_clock([{"rank": rank, "events": each} for rank, each in enumerate(events)])
    assert [(rank.start, rank.end) for rank in ranks] == [(0, 500), (200, 800)]
    assert [rank.compute for rank in ranks] == [[(200, 300)], [(400, 500)]]  # and not what was before its step
    traced = chrome_trace(ranks)["traceEvents"]
    assert {e["args"]["name"] for e in traced if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert {e["pid"] for e in traced} == {0, 1}
    (found,) = (e for e in traced if e.get("cat") == STAGE)
    assert (found["tid"], found["pid"], found["ts"]) == ("stage 1", 1, 400)
    (axes,) = draw(ranks, title="a step").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert "F0" in [text.get_text() for text in axes.texts]


TINY = "--model.arch=tiny --model.stem=imagenet --data.num_train=128 --data.batch_size=16 --trainer.accelerator=cpu"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "stages"), [("ddp", False), ("pp", True)])
def test_a_step_on_two_processes(tmp_path: Path, mode: str, stages: bool) -> None:
    sizes = ["--trainer.strategy.num_microbatches=4"] if stages else []
    done = run_here("bench", "trace", f"--mode={mode}", f"--output={tmp_path}", *TINY.split(), *sizes)
    assert "waiting" in done.stdout
    ranks = json.loads((tmp_path / "summary.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {e["pid"]: e["dur"] / 1e3 for e in events if e["name"] == STEP}
    for rank in ranks:
        assert sum(rank["ms"].values()) == pytest.approx(steps[rank["rank"]], abs=0.01)  # as precise as a time of day
        assert rank["ms"]["compute"] > 0
        assert rank["ms"]["waiting"] > 0
    assert any(e["name"].startswith("gloo:") for e in events)
    assert any(e.get("cat") == STAGE for e in events) == stages
    with Image.open(tmp_path / "trace.png") as picture:
        assert picture.width > 1000


@pytest.mark.slow
def test_an_epoch_that_is_too_short_has_a_remedy(tmp_path: Path) -> None:
    words = ["--mode=single", f"--output={tmp_path}", *TINY.split(), "--data.num_train=32"]
    assert "--data.num_train" in refused("bench", "trace", *words)
