"""Frames and figures from run folders written by hand."""

import math
from pathlib import Path

import pytest
import torch

from analysis.run_frames import (
    per_rank_frame,
    read_digests,
    read_metrics,
    read_per_rank,
)
from lit_cifar.checkpoint.files import digest, note_epoch
from lit_cifar.checkpoint.format import POSITION
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.evaluation_tables import write_per_rank
from lit_cifar.reporting.rank_statistics import AccuracyCount

ONE_BAD = [AccuracyCount(900, 1000), AccuracyCount(895, 1000), AccuracyCount(800, 1000), AccuracyCount(910, 1000)]


def test_metrics_have_one_row_for_each_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,lr-SGD,step,train/loss,val/acc\n,0.1,3,,\n0,,3,,0.5\n0,,3,1.5,\n,0.1,7,,\n1,,7,1.25,\n"
    )
    frame = read_metrics(tmp_path)
    assert frame["step"].tolist() == [3, 7]
    assert frame["epoch"].tolist() == [0, 1]
    assert frame["train/loss"].tolist() == [1.5, 1.25]
    assert frame["val/acc"][0] == 0.5
    assert math.isnan(frame["val/acc"][1])


def test_digests_are_those_of_the_run_folder(tmp_path: Path) -> None:
    weights = [{"a": torch.tensor([value])} for value in (1.0, 2.0)]
    for epoch, own in enumerate(weights, start=1):
        note_epoch({"state_dict": own, POSITION: {"epoch": epoch, "step": 0}}, tmp_path)
    assert read_digests(tmp_path).to_dict() == {1: digest(weights[0]), 2: digest(weights[1])}


def test_per_rank_rows_come_back_with_intervals_and_flags(tmp_path: Path) -> None:
    write_per_rank(tmp_path, "val", [AccuracyCount(1, 2)])
    write_per_rank(tmp_path, "test", ONE_BAD)
    frame = read_per_rank(str(tmp_path), split="test")
    assert frame["rank"].tolist() == ["0", "1", "2", "3", "all"]
    assert frame["correct"].tolist() == [900, 895, 800, 910, 3505]
    assert frame["deviates"].tolist() == [False, False, True, False, False]
    assert (frame["low"][2], frame["high"][2]) == ONE_BAD[2].interval()
    assert frame["accuracy"][4] == pytest.approx(3505 / 4000)
    assert read_per_rank(tmp_path, split="val")["total"].tolist() == [2, 2]
    assert per_rank_frame(ONE_BAD, split="test").equals(frame[frame["rank"] != "all"])


def test_missing_files_and_splits_name_the_folder_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no metrics\.csv in the run folder .*\n.*lit_cifar fit") as caught:
        read_metrics(tmp_path)
    assert str(tmp_path) in caught.value.problem
    with pytest.raises(ConfigError, match=r"no weights\.sha256 in the run folder .*\n.*lit_cifar fit"):
        read_digests(tmp_path)
    with pytest.raises(ConfigError, match=r"no per_rank\.csv in the run folder .*\n.*lit_cifar test"):
        read_per_rank(tmp_path, split="test")
    write_per_rank(tmp_path, "test", [AccuracyCount(1, 2)])
    with pytest.raises(ConfigError, match=r"no rows of split=val\n.*lit_cifar validate"):
        read_per_rank(tmp_path, split="val")
