"""Comparing trainings: weights of checkpoints, and losses."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from analysis.training_differences import (
    largest_differences,
    plot_distances,
    plot_losses,
    plot_side_by_side,
    read_losses,
    read_weights,
)
from lit_cifar.errors import ConfigError


def weights_of(*, weight: float, mean: float) -> dict[str, torch.Tensor]:
    return {
        "network.bn1.weight": torch.tensor([1.0, weight]),
        "network.bn1.running_mean": torch.tensor([mean], dtype=torch.float64),
        "network.bn1.num_batches_tracked": torch.tensor(round(1000 * mean)),
    }


def test_parameters_and_running_statistics_are_compared_apart() -> None:
    weights = {"a": weights_of(weight=1.0, mean=0.5), "b": weights_of(weight=3.0, mean=0.25)}
    trained, running = (largest_differences(weights, running=running) for running in (False, True))
    assert trained.to_dict() == {"a": {"a": 0.0, "b": 2.0}, "b": {"a": 2.0, "b": 0.0}}
    assert running.to_dict() == {"a": {"a": 0.0, "b": 0.25}, "b": {"a": 0.25, "b": 0.0}}


def test_weights_are_read_from_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoints/last\.ckpt in the run folder .*\n.*lit_cifar fit"):
        read_weights(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": weights_of(weight=2.0, mean=0.0)}, tmp_path / "checkpoints" / "last.ckpt")
    assert read_weights(tmp_path)["network.bn1.weight"].tolist() == [1.0, 2.0]


def test_losses_end_with_nan_where_a_run_did_not_reach_its_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss_step,train/loss\n0,2.5,\n1,,\n2,4.0,\n2,,3.0\n")
    assert read_losses(tmp_path)[:2] == [2.5, 4.0]
    assert math.isnan(read_losses(tmp_path)[2])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert read_losses(tmp_path) == [2.5, 4.0]


def test_a_loss_that_becomes_nan_is_crossed(tmp_path: Path) -> None:
    figure = plot_losses(
        {"one": {"a": [1.0, 10.0, math.nan, math.nan]}, "other": {"b": [2.0, 1.0]}}, xlabels=["x", "y"]
    )
    one, other = figure.axes
    assert [line.get_xydata().tolist() for line in one.lines] == [[[0, 1], [1, 10]], [[2, 10]]]
    assert [line.get_xydata().tolist() for line in other.lines] == [[[0, 2], [1, 1]]]
    assert (one.get_xlabel(), other.get_xlabel(), one.get_yscale()) == ("x", "y", "log")
    figure.savefig(tmp_path / "figure.png")


def test_equal_curves_are_all_seen(tmp_path: Path) -> None:
    """Each is narrower than the one below it, or has points alone."""
    curve = pd.Series([2.0, 1.0], index=[8, 16])
    curves = {"a": curve, "b": curve, "c": curve, "d": curve, "e": curve}
    figure = plot_side_by_side({"apart": {"a": curve, "b": curve + 1}, "one": curves}, xlabel="x", ylabel="y")
    apart, one = figure.axes
    assert [line.get_xydata().tolist() for line in apart.lines] == [[[8, 2], [16, 1]], [[8, 3], [16, 2]]]
    assert apart.get_ylim() == one.get_ylim()
    widths = [line.get_linewidth() for line in one.lines if line.get_linestyle() != "None"]
    assert widths == sorted(widths, reverse=True)
    assert len({(line.get_linestyle(), line.get_marker(), line.get_linewidth()) for line in one.lines}) == 5
    assert [text.get_text() for text in one.get_legend().get_texts()] == ["a", "b", "c", "d", "e"]
    figure.savefig(tmp_path / "figure.png")
    (more,) = plot_side_by_side({"": {str(number): curve for number in range(8)}}, xlabel="x", ylabel="y").axes
    assert len(more.lines) == 8


@pytest.mark.parametrize(("values", "floor"), [([0.0, 3e-6, 0.2], 1e-6), ([0.0, 0.0, 0.0], 1.0)])
def test_no_distance_has_a_place_below_the_smallest_one(tmp_path: Path, values: list[float], floor: float) -> None:
    figure = plot_distances({"a": pd.Series(values)}, xlabel="x", ylabel="y")
    (axes,) = figure.axes
    heights = axes.transData.transform([[0, value] for value in (0.0, floor, 10 * floor)])[:, 1]
    assert 0 < heights[1] - heights[0] <= heights[2] - heights[1]
    assert axes.get_ylim()[0] == 0
    figure.savefig(tmp_path / "figure.png")
