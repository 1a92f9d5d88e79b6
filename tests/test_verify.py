"""`verify`: the comparison as plain functions, every mode compared for real, and a planted mistake that is caught."""

import math
from pathlib import Path

import pytest
import torch
from commands import run_here
from torch import Tensor

from lit_cifar.commands.verify import bugs, verify
from lit_cifar.commands.verify.compare import (
    EXACT_BOUND,
    KINDS,
    Step,
    difference,
    differences,
    first_excess,
    largest,
    measured_bounds,
    sample_problems,
)
from lit_cifar.commands.verify.modes import chosen, in_words, modes
from lit_cifar.commands.verify.rows import Row
from lit_cifar.commands.verify.runs import run
from lit_cifar.commands.verify.selftest import ARGS, self_test
from lit_cifar.layout import Chunks

TINY = [
    "--model.arch=resnet10",
    "--model.stem=imagenet",
    "--model.optimizer.lr=0.02",
    "--data.dataset=synthetic",
    "--data.num_train=175",
    "--data.val_size=15",
    "--data.batch_size=64",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.gradient_clip_val=0.5",
    "--trainer.precision=64-true",
]


def step(*, loss: float = 2.0, weight: float = 0.5, mean: float = 0.1, momentum: float = 0.3, lr: float = 0.1) -> Step:
    """A network of two layers, the second with BatchNorm, after a step."""
    return {
        "loss": torch.tensor(loss, dtype=torch.float64),
        "state": {
            "conv.weight": torch.full((2, 2), weight, dtype=torch.float64),
            "bn.weight": torch.ones(2, dtype=torch.float64),
            "bn.running_mean": torch.full((2,), mean, dtype=torch.float64),
            "bn.num_batches_tracked": torch.tensor(1),
        },
        "buffers": ["bn.running_mean", "bn.num_batches_tracked"],
        "optimizer": {
            "state": {i: {"momentum_buffer": torch.full((2,), momentum, dtype=torch.float64)} for i in range(2)},
            "param_groups": [{"lr": lr, "nesterov": True, "foreach": None, "params": [0, 1]}],
        },
    }


@pytest.mark.parametrize(
    ("found", "expected", "gap"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0),
        (torch.tensor([0.1]), torch.tensor([0.2]), 0.1),
        (torch.tensor([100.0, 0.0]), torch.tensor([50.0, 0.0]), 1.0),
        (torch.tensor(7), torch.tensor(8), 1 / 8),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (torch.zeros(2), torch.zeros(3), math.inf),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([1.0]), torch.tensor([math.nan]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf),
    ],
)
def test_difference(found: Tensor, expected: Tensor, gap: float) -> None:
    assert difference(found, expected) == pytest.approx(gap, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        ({"loss": 2.1}, "loss", "loss"),
        ({"weight": 0.6}, "parameters", "conv.weight"),
        ({"mean": 0.2}, "buffers", "bn.running_mean"),
        ({"momentum": 0.4}, "optimizer", "conv.weight:momentum_buffer"),
        ({"lr": 0.2}, "optimizer", "group 0:lr"),
    ],
)
def test_a_change_of_each_kind_is_seen_and_named(change: dict[str, float], kind: str, name: str) -> None:
    of_step = differences(step(**change), step())
    assert [k for k, value in largest(of_step).items() if value] == [kind]
    excess = first_excess(of_step, dict.fromkeys(KINDS, EXACT_BOUND), step=2)
    assert excess is not None
    assert (excess.step, excess.kind, excess.name) == (2, kind, name)
    assert name in str(excess)


def test_equal_steps_do_not_differ() -> None:
    of_step = differences(step(), step())
    assert largest(of_step) == dict.fromkeys(KINDS, 0.0)
    assert first_excess(of_step, dict.fromkeys(KINDS, 0.0), step=1) is None


@pytest.mark.parametrize("lost", ["conv.weight", "bn.running_mean"])
def test_what_one_side_lacks_is_an_infinite_difference(lost: str) -> None:
    lacking = {**step(), "state": {name: value for name, value in step()["state"].items() if name != lost}}
    for pair in ((lacking, step()), (step(), lacking)):
        assert math.inf in {value for by_name in differences(*pair).values() for value in by_name.values()}


def test_the_first_difference_follows_the_network() -> None:
    of_step = {"loss": {}, "buffers": {}, "parameters": {"a": 0.0, "b": 2.0, "c": 3.0}, "optimizer": {"a": 9.0}}
    excess = first_excess(of_step, dict.fromkeys(KINDS, 1.0), step=1)
    assert excess is not None
    assert excess.name == "b"


def test_tolerance_is_the_largest_noise_so_far_and_never_below_the_floor() -> None:
    quiet, loud = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 1e-3)
    bounds = measured_bounds([[quiet, loud, quiet], [quiet, quiet, quiet]], eps=1e-7)
    assert [bound["loss"] for bound in bounds] == pytest.approx([4e-7, 4e-3, 4e-3])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([[1, 3], [2, 4]], []),
        ([[4, 3, 2, 1]], []),
        ([[1, 3], [2]], ["missing"]),
        ([[1, 3], [1, 3]], ["missing", "too often"]),
        ([[1, 3], [2, 4, 5]], ["foreign"]),
    ],
)
def test_samples_are_compared_as_sets_in_which_each_id_is_once(found: list[list[int]], words: list[str]) -> None:
    problems = sample_problems(found, [1, 2, 3, 4])
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_words_for_what_a_mode_equals() -> None:
    assert in_words(Chunks(), batch_size=64) == "one device"
    words = in_words(Chunks(num_shards=2, num_microbatches=2), batch_size=64)
    assert words == "one device, 4 x 16 images normalised apart"


@pytest.mark.parametrize("devices", [2, 4])
def test_every_mode_has_a_layout_before_it_runs(devices: int) -> None:
    for mode in modes(devices).values():
        chunks = mode.chunks(accumulation=2)
        assert chunks.accumulation == 2
        assert chunks.num_shards * chunks.replicas_per_shard <= devices


def test_a_mode_that_cannot_run_on_so_many_devices_is_refused() -> None:
    result = run_here("verify", "--modes=tp", "--devices=3", "--data.val_size=0")
    assert result.status == 2
    assert "3" in result.stderr


def test_all_and_chosen_modes_come_in_the_order_of_the_table() -> None:
    assert [mode.name for mode in chosen(["ddp", "dp"], devices=2)] == ["dp", "ddp"]
    assert [mode.name for mode in chosen(["all"], devices=2)] == list(modes(2))


def test_every_planted_mistake_has_a_mode_and_a_name_of_its_own() -> None:
    assert len(bugs.BUGS) >= 12
    assert {bug.mode for bug in bugs.BUGS.values()} <= set(modes(2))


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--modes=dpp"], "dpp"),
        (["--devices=1"], "--devices=1"),
        (["--devices=two"], "two"),
        (["--steps=0"], "--steps=0"),
        (["--trainer.strategy=ddp"], "--trainer.strategy"),
        (["--json=/nowhere/at/all.json"], "--json"),
        (["--self-test", "--model.arch=resnet10"], "--self-test"),
    ],
)
def test_bad_arguments_exit_2_with_a_remedy(args: list[str], word: str) -> None:
    result = run_here("verify", *args)
    assert result.status == 2
    assert word in result.stderr
    assert 2 <= len(result.stderr.splitlines()) <= 5


def test_what_takes_too_long_is_stopped(tmp_path: Path) -> None:
    outcome = run("fit", "--help", folder=tmp_path, timeout_s=0.2)
    assert outcome.status is None
    assert "time limit" in outcome.last_words


# All of them take minutes.
SHOWN_FIRST = ["pp"]


def compared(names: list[str]) -> dict[str, Row]:
    """With gradients accumulated and clipped and a ragged last batch."""
    return {row.mode: row for row in verify(names, devices=2, args=TINY)}


@pytest.fixture(scope="module")
def first_rows() -> dict[str, Row]:
    return compared(SHOWN_FIRST)


@pytest.fixture(scope="module")
def other_rows() -> dict[str, Row]:
    return compared([name for name in modes(2) if name not in SHOWN_FIRST])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHOWN_FIRST else pytest.mark.slow) for name in modes(2)]
)
def test_every_mode_trains_what_one_device_trains(name: str, request: pytest.FixtureRequest) -> None:
    row = request.getfixturevalue("first_rows" if name in SHOWN_FIRST else "other_rows")[name]
    assert row.problems == []
    assert row.differences.keys() == set(KINDS)
    assert max(row.differences.values()) <= EXACT_BOUND
    assert row.counts is not None
    assert row.counts[1] == 15
    in_one_process = name in ("single", "dp", "mp", "mp-micro", "ddp_mp")  # two stages of two devices: one process
    assert row.processes == (1 if in_one_process else 2)


@pytest.mark.timeout(300)
def test_a_planted_mistake_is_caught_and_its_absence_passes() -> None:
    findings = self_test(bugs=[bugs.BUGS["last-replica"]])
    assert [(finding.bug is None, finding.right) for finding in findings] == [(True, True), (False, True)]
    assert "running_mean" in findings[1].problems[0]
    assert "--trainer.precision=64-true" in ARGS
