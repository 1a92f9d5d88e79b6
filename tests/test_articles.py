"""What the articles print, beside runs written by hand."""

import math
from pathlib import Path

import pytest
import yaml

from analysis.articles import (
    PRINTED_LOSSES,
    PRINTED_RUNS,
    accuracy_of_test,
    beside_printed,
    epoch_means,
    find_records,
    plot_beside_printed,
)
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.evaluation_tables import write_per_rank
from lit_cifar.reporting.rank_statistics import AccuracyCount

REPRODUCE = Path(__file__).parents[1] / "configs" / "reproduce"


def write_run(folder: Path, *losses: float) -> Path:
    """A run with these mean losses; its first epoch has a row in the middle as well."""
    rows = [f"{epoch},{10 * epoch + 9},{loss},0.5" for epoch, loss in enumerate(losses)]
    folder.mkdir()
    (folder / "metrics.csv").write_text("\n".join(["epoch,step,train/loss,train/acc", ",4,,", *rows]) + "\n")
    return folder


def test_epochs_count_from_one_and_a_run_in_its_first_is_named(tmp_path: Path) -> None:
    means = epoch_means(write_run(tmp_path / "run", 2.5, 1.5))
    assert means["loss"].to_dict() == {1: 2.5, 2: 1.5}
    assert means["accuracy"].tolist() == [0.5, 0.5]
    (axes,) = plot_beside_printed({"a run": means}).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["a run"] == [[1, 2.5], [2, 1.5]]
    assert lines["printed in the articles"][-1] == [6, 0.55]
    with pytest.raises(ConfigError, match="no epoch is complete in"):
        epoch_means(write_run(tmp_path / "other"))


def test_losses_beside_the_printed_ones(tmp_path: Path) -> None:
    runs = {"short": epoch_means(write_run(tmp_path / "short", 2.17, 1.76))}
    runs["long"] = epoch_means(write_run(tmp_path / "long", *(loss + 0.25 for loss in PRINTED_LOSSES), 0.1))
    frame = beside_printed(runs)
    assert frame.index.tolist() == ["printed", "short", "long"]
    assert frame.columns.tolist() == [1, 2, 3, 4, 5, 6, "distance"]
    assert frame.loc["printed", 6] == 0.55
    assert math.isnan(frame.loc["short", 3])
    assert frame["distance"].tolist() == pytest.approx([0, 0.2, 0.25])


def test_the_test_accuracy_of_a_run_that_was_tested_and_of_one_that_was_not(tmp_path: Path) -> None:
    write_per_rank(tmp_path, "test", [AccuracyCount(1, 2), AccuracyCount(2, 2)])
    assert accuracy_of_test(tmp_path) == 0.75
    assert math.isnan(accuracy_of_test(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"not a checkout of lit_cifar.*\n.*find_records\('FOLDER'\)"):
        find_records(tmp_path)


@pytest.mark.parametrize("run", PRINTED_RUNS.to_dict("records"), ids=lambda run: run["config"])
def test_every_printed_run_has_a_configuration_with_its_batch(run: dict[str, object]) -> None:
    config = yaml.safe_load((REPRODUCE / f"{run['config']}.yaml").read_text())
    assert config["data"]["batch_size"] == run["batch"]
    if run["steps per epoch"] != "not printed":
        assert math.ceil(50_000 / config["data"]["batch_size"]) == run["steps per epoch"]
