"""`python -m lit_cifar bench trace`: where the time and the memory of one training step go."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_here
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.profiler import profile

from lit_cifar.models import build_network
from lit_cifar.tools.bench.step_events import STAGE, STEP, RankStep, chrome_trace, draw, on_one_clock, union
from lit_cifar.tools.bench.step_trace import SavedForBackward


def event(name: str, start: float, duration: float, *, thread: Any = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration, "tid": thread, "pid": 99}


def rank_step(*events: dict[str, Any], end: float = 100.0) -> RankStep:
    return RankStep(rank=0, start=0.0, end=end, events=list(events), memory_bytes={})


# Intervals -----------------------------------------------------------------------------------------------------------


def test_overlapping_intervals_count_once() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([]) == []


def test_what_takes_turns_is_never_at_once() -> None:
    names = ["aten::add", "gloo:send"] * 4
    found = rank_step(*(event(name, 0.3 * i, 0.1) for i, name in enumerate(names)))
    assert str(found.shares_ms["overlapped"]) == "0.0"  # not -0.0 by rounding


def test_operators_within_others_count_once_and_python_is_host() -> None:
    found = rank_step(
        event("Optimizer.step", 0, 90, cat="user_annotation"),
        event("aten::conv2d", 10, 20),
        event("aten::convolution", 12, 15),
        event("ConvolutionBackward0", 40, 30),  # what it computes are operators again
        event("aten::convolution_backward", 45, 10),
    )
    assert found.compute == [(10, 30), (45, 55)]
    assert found.shares_ms["host"] == pytest.approx(0.07)


def test_a_collective_is_no_compute_even_while_it_copies() -> None:
    found = rank_step(
        event("aten::add", 0, 30),
        event("gloo:all_gather", 20, 60, thread=7, cat="user_annotation"),
        event("aten::copy_", 40, 30, thread=7),
        event("c10d::allreduce_", 35, 50),
    )
    assert found.compute == [(0, 30)]
    assert found.shares_ms == pytest.approx({"compute": 0.02, "overlapped": 0.01, "waiting": 0.05, "host": 0.02})


def test_messages_are_noted_in_the_computing_thread() -> None:
    found = rank_step(event("gloo:recv", 10, 40, cat="user_annotation"), event("aten::mm", 20, 10))
    assert found.compute == [(20, 30)]
    assert found.communication == [(10, 50)]


def test_on_a_gpu_kernels_count_and_not_the_operators_that_queue_them() -> None:
    found = rank_step(
        event("aten::conv2d", 0, 100),
        event("conv_kernel", 30, 40, thread="stream 7", cat="kernel"),
        event("ncclDevKernel_AllReduce", 50, 40, thread="stream 20", cat="kernel"),
        event("Memcpy PtoP", 95, 5, thread="stream 7", cat="gpu_memcpy"),
    )
    assert found.compute == [(30, 70)]
    assert found.communication == [(50, 90), (95, 100)]


def test_what_began_before_the_end_is_cut_there() -> None:
    assert rank_step(event("aten::add", 90, 50)).compute == [(90, 100)]


# Ranks ---------------------------------------------------------------------------------------------------------------


def two_ranks() -> list[RankStep]:
    own = event(STEP, 6000, 500, cat="user_annotation")
    late = event(STEP, 6200, 600, cat="user_annotation")
    stage = event("F0", 6400, 100, thread="stage 1", cat=STAGE)
    events = (
        [own, event("aten::add", 6200, 100)],
        [late, event("aten::mul", 6150, 10), stage, event("aten::add", 6400, 100)],
    )
    return on_one_clock([{"rank": rank, "events": each, "memory_bytes": {}} for rank, each in enumerate(events)])


def test_all_ranks_have_one_clock() -> None:
    first, second = two_ranks()
    assert (first.start, first.end, second.start, second.end) == (0, 500, 200, 800)
    assert first.compute == [(200, 300)]
    assert second.compute == [(400, 500)]  # and not what was before its step


def test_the_trace_has_a_process_for_each_rank_and_a_row_for_each_stage() -> None:
    events = chrome_trace(two_ranks())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert {e["pid"] for e in events} == {0, 1}
    (stage,) = (e for e in events if e.get("cat") == STAGE)
    assert (stage["tid"], stage["pid"], stage["ts"]) == ("stage 1", 1, 400)


def test_the_picture_has_a_row_for_each_rank() -> None:
    figure = draw(two_ranks(), title="a step")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert "F0" in [text.get_text() for text in axes.texts]


# Memory --------------------------------------------------------------------------------------------------------------


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_saved_bytes_by_hand() -> None:
    """The images, and the output of the first layer, which ReLU changes in place: n x (6 + 4) float32."""
    counter = SavedForBackward(layers := chain())
    counter.begin()
    output = layers(torch.randn(5, 1, 2, 3))
    counter.end()
    assert counter.peak == 5 * (6 + 4) * 4
    output.sum().backward()
    assert counter.now == 0


@pytest.mark.parametrize(("arch", "autocast"), [("tiny", None), ("tiny", torch.bfloat16), ("vit_micro", None)])
def test_saved_bytes_of_a_network(arch: Any, autocast: torch.dtype | None) -> None:
    """What autograd asks to keep, and what the allocator gives, agree."""
    network = build_network(arch, stem=None, num_classes=10, image_size=32).train()
    images = torch.randn(8, 3, 32, 32)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, torch.zeros(8, dtype=torch.int64))

    counter = SavedForBackward(network)
    with profile(profile_memory=True) as profiled, torch.autocast("cpu", autocast, enabled=autocast is not None):
        counter.begin()
        loss = loss_of(network(images))
        counter.end()
    allocated = sum(e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]")
    assert allocated + images.nbytes == pytest.approx(counter.peak, rel=0.1)
    assert loss.requires_grad  # else nothing would have been kept


# The command ---------------------------------------------------------------------------------------------------------


TINY = [
    "--model.arch=tiny",
    "--model.stem=imagenet",
    "--data.num_train=128",
    "--data.batch_size=16",
    "--trainer.accelerator=cpu",
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "stages"), [("ddp", False), ("pp", True)])
def test_a_step_on_two_processes(tmp_path: Path, mode: str, stages: bool) -> None:
    sizes = ["--trainer.strategy.num_microbatches=4"] if stages else []
    done = run_here("bench", "trace", f"--mode={mode}", f"--output={tmp_path}", *TINY, *sizes)
    assert done.status == 0, done.stderr
    assert "waiting" in done.stdout
    ranks = json.loads((tmp_path / "summary.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {e["pid"]: e["dur"] / 1e3 for e in events if e["name"] == "one training step"}
    for rank in ranks:
        assert sum(rank["ms"].values()) == pytest.approx(steps[rank["rank"]], abs=0.01)  # as precise as a time of day
        assert rank["ms"]["compute"] > 0
        assert rank["ms"]["waiting"] > 0
        assert all(
            rank["memory_bytes"][what] > 0 for what in ("parameters", "gradients", "optimizer state", "activations")
        )
    assert any(e["name"].startswith("gloo:") for e in events)
    assert any(e.get("cat") == "stage" for e in events) == stages
    with Image.open(tmp_path / "trace.png") as picture:
        assert picture.width > 1000


@pytest.mark.slow
def test_an_epoch_that_is_too_short_has_a_remedy(tmp_path: Path) -> None:
    done = run_here("bench", "trace", "--mode=single", f"--output={tmp_path}", *TINY, "--data.num_train=32")
    assert done.status == 2
    assert "--data.num_train" in done.stderr
