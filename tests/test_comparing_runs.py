"""Comparisons of runs, against values of the literature and by counting."""

import json
from pathlib import Path

import numpy as np
import pytest

from analysis.comparing_runs import paired, read_run, read_shuffling, welch
from lit_cifar.errors import ConfigError

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


@pytest.mark.parametrize("compare", [welch, paired])
def test_of_equal_groups_one_in_twenty_seems_to_differ(compare) -> None:
    rng = np.random.default_rng(0)
    found = [compare(*rng.normal(size=(2, 4))) for _ in range(400)]
    assert 0.02 < np.mean([comparison.p < 0.05 for comparison in found]) < 0.08
    assert [comparison.p < 0.05 for comparison in found] == [not c.low <= 0 <= c.high for c in found]


@pytest.mark.parametrize("values", [([1.0], [2.0]), ([1.0, 1.0], [2.0, 2.0])])
@pytest.mark.parametrize("compare", [welch, paired])
def test_what_cannot_be_compared_says_so(compare, values) -> None:
    with pytest.raises(ConfigError, match="train more seeds"):
        compare(*values)


def test_a_record_becomes_a_frame(tmp_path: Path) -> None:
    row = {"seed": 0, "processes": 2, "set_epoch": True, "losses": [2.0, 0.5], "correct": 40, "total": 100}
    (tmp_path / "record.json").write_text(json.dumps({"rows": [row, row | {"set_epoch": False, "correct": 30}]}))
    frame = read_shuffling(tmp_path / "record.json")
    found = {"seed": 0, "processes": 2, "set_epoch": True, "accuracy": 0.4, "loss": 0.5}
    assert frame.to_dict("records") == [found, found | {"set_epoch": False, "accuracy": 0.3}]
    with pytest.raises(ConfigError, match=r"no record .*\n.*benchmarks/scripts/shuffling\.py"):
        read_shuffling(tmp_path / "absent.json")


def test_a_run_s_accuracy_and_last_loss(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,train/loss,val/acc\n0,3,1.5,\n0,3,,0.5\n1,7,1.25,\n1,7,,0.6\n")
    assert read_run(tmp_path) == {"accuracy": 0.6, "loss": 1.25}
    (tmp_path / "metrics.csv").write_text("epoch,step,train/loss\n0,3,1.5\n")
    with pytest.raises(ConfigError, match=r"has logged no val/acc.*\n.*--data\.val_size"):
        read_run(tmp_path)
