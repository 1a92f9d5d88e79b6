"""What the notebooks read from run folders and draw: mostly folders written by hand."""

import math
from pathlib import Path

import pytest
from commands import TINY, run_here

from analysis.comparing_runs import paired, welch
from analysis.interrupted_runs import learning_rates
from analysis.run_frames import per_rank_frame, read_metrics, read_per_rank
from analysis.scaling import MIB, accuracy_over_time, read_memory, read_speed, time_to
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.evaluation_tables import write_per_rank
from lit_cifar.reporting.rank_statistics import AccuracyCount


def test_metrics_have_one_row_for_each_step(tmp_path: Path) -> None:
    rows = "epoch,lr-SGD,step,train/loss_step,val/acc\n,0.1,3,,\n0,,3,,0.5\n0,,3,1.5,\n,0.05,7,,\n1,,7,1.25,\n"
    (tmp_path / "metrics.csv").write_text(rows)
    frame = read_metrics(tmp_path)
    assert frame[["step", "epoch", "train/loss_step"]].values.tolist() == [[3, 0, 1.5], [7, 1, 1.25]]
    assert frame["val/acc"][0] == 0.5
    assert math.isnan(frame["val/acc"][1])
    assert learning_rates(tmp_path).values.tolist() == [[4, 0.1], [8, 0.05]]


def test_per_rank_rows_come_back_with_intervals_and_flags(tmp_path: Path) -> None:
    one_bad = [AccuracyCount(correct, 1000) for correct in (900, 895, 800, 910)]
    write_per_rank(tmp_path, "test", one_bad)
    with pytest.raises(ConfigError, match=r"no rows of split=val\n.*lit_cifar validate"):
        read_per_rank(tmp_path, split="val")
    frame = read_per_rank(str(tmp_path), split="test")
    assert frame["rank"].tolist() == ["0", "1", "2", "3", "all"]
    assert frame["correct"].tolist() == [900, 895, 800, 910, 3505]
    assert frame["deviates"].tolist() == [False, False, True, False, False]
    assert (frame["low"][2], frame["high"][2]) == one_bad[2].interval()
    assert frame["accuracy"][4] == pytest.approx(3505 / 4000)
    assert per_rank_frame(one_bad, split="test").equals(frame[frame["rank"] != "all"])


def test_seconds_follow_from_the_speed_of_each_window(tmp_path: Path) -> None:
    """Steps 0 and 1 took 0.1 s each, 2 and 3 took 0.2 s each, 4 and 5 again 0.1 s; step 6 is taken to be like them."""
    (tmp_path / "config.yaml").write_text("data: {batch_size: 10}\n")
    rows = ["epoch,step,train/loss,val/acc", "0,2,2.0,0.3", "1,6,1.5,0.5", ""]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    with pytest.raises(ConfigError, match=r"has logged no train/images_per_s.*\n.*log_every_n_steps"):
        read_speed(tmp_path)
    # A window of 2 steps is logged at its end. Epochs end with step 2, in a window, and with step 6, after the last.
    rows = ["epoch,step,train/images_per_s,val/acc", "0,1,100,", "0,2,,0.3", "1,3,50,", "1,5,100,", "1,6,,0.5", ""]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    frame = accuracy_over_time(tmp_path)
    assert frame["accuracy"].tolist() == [0.3, 0.5]
    assert frame["seconds"].tolist() == pytest.approx([0.4, 0.9])
    assert time_to(frame, 0.3) == pytest.approx({"steps": 3, "seconds": 0.4})
    assert time_to(frame, 0.31) == pytest.approx({"steps": 7, "seconds": 0.9})
    assert all(map(math.isnan, time_to(frame, 0.6).values()))


MEMORY = "--trainer.callbacks+=analysis.memory.TrainingMemory"
STATE_BYTES = 3 * 4 * 91_866  # weights, gradients and momentum of the tiny network


def test_what_one_device_holds(tmp_path: Path) -> None:
    run_here("fit", *TINY, MEMORY, f"--run_dir={tmp_path / 'run'}")
    found = read_memory(tmp_path / "run")
    assert found["state_mib"].tolist() == [STATE_BYTES / MIB]
    assert not math.isnan(found["resident_peak_mib"][0])
    assert read_speed(tmp_path / "run") > 0
    assert accuracy_over_time(tmp_path / "run")["step"].tolist() == [4]


# Student, "The probable error of a mean", Biometrika 6, 1908: additional hours of sleep of ten patients, two drugs.
DEXTRO = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
LAEVO = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_student_s_data() -> None:
    """As every textbook prints it, apart: t = -1.8608, 17.776 degrees of freedom, p = 0.07939, -3.365 to 0.205.

    Student himself, in pairs: t = -4.0621 with 9 degrees of freedom, p = 0.002833, -2.45989 to -0.70011.
    """
    apart, pairs = welch(DEXTRO, LAEVO), paired(DEXTRO, LAEVO)
    assert apart.num_runs == (10, 10)
    assert apart.difference == pytest.approx(-1.58)
    assert (apart.low, apart.high) == pytest.approx((-3.3654832, 0.2054832), abs=1e-4)
    assert (pairs.low, pairs.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-4)
    assert (apart.p, pairs.p) == pytest.approx((0.07939, 0.002833), abs=1e-5)
