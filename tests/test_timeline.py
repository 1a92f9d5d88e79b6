"""Who works when: the recorder, its trace, and what is read from it; `test_pipeline` has the callback in runs."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.stage_timeline import read_timeline
from analysis.timeline import StageRecorder, write_trace
from lit_cifar.models import build_resnet
from lit_cifar.models.partition import Partition
from lit_cifar.strategies.mp import StagedForward, gpipe_order

CPU = torch.device("cpu")


def trained(recorder: StageRecorder | None, *, num_microbatches: int) -> tuple[nn.Module, Tensor]:
    """A step of a network in two stages."""
    torch.manual_seed(0)
    network = build_resnet("tiny", stem="strided")
    stages = [stage.module(network) for stage in Partition.cut(network, (3, 32, 32), num_stages=2).stages]
    forward_fn = StagedForward(stages, [CPU, CPU], num_microbatches=num_microbatches, recorder=recorder)
    if recorder is not None:
        recorder.begin(0, network)
    logits = forward_fn(torch.randn(8, 3, 32, 32))
    F.cross_entropy(logits, torch.arange(8)).backward()
    return network, logits


def frame_of(recorder: StageRecorder, folder: Path) -> pd.DataFrame:
    write_trace(recorder.spans(), folder / "timeline.json")
    return read_timeline(folder)


def test_stages_of_one_process_are_recorded_in_the_order_of_their_work(tmp_path: Path) -> None:
    recorder = StageRecorder()
    trained(recorder, num_microbatches=4)
    frame = frame_of(recorder, tmp_path)
    order = list(gpipe_order(num_microbatches=4, num_stages=2))
    done = {kind: list(zip(part["microbatch"], part["stage"], strict=True)) for kind, part in frame.groupby("kind")}
    assert done == {"forward": order, "backward": order[::-1]}
    assert (frame["start_ms"].to_numpy()[1:] >= frame["end_ms"].to_numpy()[:-1]).all(), "one process, one at a time"
    assert (frame["end_ms"] > frame["start_ms"]).all()
    assert frame["worker"].tolist() == [f"cpu {stage}" for stage in frame["stage"]]


def test_recording_changes_no_bit() -> None:
    plain, recorded = (trained(recorder, num_microbatches=2) for recorder in (None, StageRecorder()))
    assert torch.equal(plain[1], recorded[1])
    for expected, found in zip(plain[0].parameters(), recorded[0].parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_what_is_saved_for_backward_is_that_of_the_microbatch_without_parameters(tmp_path: Path) -> None:
    saved = []
    for num_microbatches in (1, 4):
        recorder = StageRecorder()
        trained(recorder, num_microbatches=num_microbatches)
        frame = frame_of(recorder, tmp_path)
        assert (frame.loc[frame["kind"] != "forward", "saved_mib"] == 0).all()
        saved.append(frame.groupby("stage")["saved_mib"].sum().to_numpy())
    # A few numbers for each channel, mean and variance of BatchNorm, are kept by every microbatch.
    assert saved[1] == pytest.approx(saved[0], rel=0.05)
    linear, layer = StageRecorder(), nn.Linear(512, 4, bias=False)
    linear.begin(0, layer)
    with linear.span("forward", stage=0, microbatch=0, worker="cpu 0", device=CPU):
        layer(torch.ones(2, 512, requires_grad=True))
    (span,) = linear.spans()
    assert span["args"]["saved_bytes"] == 2 * 512 * 4
