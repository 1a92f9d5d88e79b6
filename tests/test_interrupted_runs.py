"""Frames and figures of interrupted runs, from files and steps written by hand."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from analysis import interrupted_runs
from analysis.interrupted_runs import (
    StepWatch,
    interruption,
    learning_rates,
    read_step_log,
    steps_in_log,
    steps_in_metrics,
    uses_per_epoch,
)
from lit_cifar.errors import ConfigError

KILLED = pd.DataFrame(
    {
        "seconds": [0.0, 1.0, 2.0, 3.0, 3.5, 3.6, 9.0, 11.0, 12.0],
        "step": [0, 1, 2, 3, 3, 4, 2, 3, 5],
        "event": ["", "", "", "", "rank 1 is killed", "", "", "", ""],
    }
)


@pytest.mark.parametrize(
    ("lines", "steps"),
    [(None, 0), ("", 0), ("0,0,2.5\n,9,\n", 10), ("0,0,2.5\n,9,\n0,1", 10)],  # the last one is being written
)
def test_steps_of_a_run_in_progress(lines: str | None, steps: int, tmp_path: Path) -> None:
    if lines is not None:
        (tmp_path / "metrics.csv").write_text("epoch,step,train/loss\n" + lines)
    assert steps_in_metrics(tmp_path) == steps


def write_log(folder: Path) -> None:
    """Two ranks, three samples a step; killed after the first step of the second epoch."""
    for rank in (0, 1):
        rows = ["start,epoch,step,lr,loss,ids", "0,0,0,,,", f"0,0,1,0.1,2.5,{rank} 2", f"0,1,2,0.1,2.0,{rank}"]
        rows += ["1,0,0,,,", f"1,0,1,0.1,1.5,{rank} 2", f"1,1,2,0.1,1.25,{rank}"]
        (folder / f"steps_rank{rank}.csv").write_text("\n".join(rows) + "\n")


def test_steps_of_a_loop(tmp_path: Path) -> None:
    assert steps_in_log(tmp_path) == 0
    with pytest.raises(ConfigError, match=r"no steps_rank\*\.csv in"):
        read_step_log(tmp_path)
    write_log(tmp_path)
    assert steps_in_log(tmp_path) == 2
    log = read_step_log(tmp_path)
    assert log[log["rank"] == 1]["ids"].tolist() == [[1, 2], [1], [1, 2], [1]]
    assert log["start"].tolist() == [0, 0, 1, 1] * 2
    assert uses_per_epoch(log).to_dict() == {0: 8, 1: 4}


def test_learning_rates_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,lr-SGD,step,train/loss\n,0.1,0,\n0,,0,2.5\n,0.05,1,\n0,,2,2.0\n")
    assert learning_rates(tmp_path).values.tolist() == [[1, 0.1], [2, 0.05]]


def test_a_watch_notes_changes_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([10.0, 11.0, 12.0, 13.0])
    monkeypatch.setattr(interrupted_runs, "perf_counter", lambda: next(clock))
    steps = iter([0, 0, 1, 1])
    watch = StepWatch(lambda: next(steps))
    assert [watch.look(), watch.look(), watch.look(), watch.look("killed")] == [0, 0, 1, 1]
    assert watch.frame.values.tolist() == [[1.0, 0, ""], [2.0, 1, ""], [3.0, 1, "killed"]]


def test_what_a_restart_repeats_and_how_long_it_takes() -> None:
    assert interruption(KILLED).to_dict() == {
        "killed_after_step": 4,  # one more was done before the process was gone
        "resumed_from_step": 2,
        "steps_repeated": 2,
        "seconds_to_next_step": 7.5,
    }
    just_after_saving = KILLED.drop(index=[5, 6, 7])
    assert [*interruption(just_after_saving)] == [3, 3, 0, 8.5]
