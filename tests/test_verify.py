"""`verify`: the comparison as plain functions, every mode compared for real, and a planted mistake that is caught."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from lit_cifar.commands.verify.records import Record
from lit_cifar.commands.verify.rows import Row
from lit_cifar.commands.verify.runs import Outcome, run
from lit_cifar.commands.verify.selftest import ARGS, _findings, _verdict, self_test
from lit_cifar.commands.verify.settings import Settings
from lit_cifar.commands.verify.trace import Trace
from lit_cifar.commands.verify.verifier import Reference, Verifier, _possible
from lit_cifar.errors import ConfigError
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


def settings(**data: int) -> Settings:
    """As `Settings.of` finds them, without asking the command line."""
    config = {
        "trainer": {"accumulate_grad_batches": 1, "precision": "64-true", "limit_val_batches": None},
        "model": {"arch": "resnet10", "stem": "imagenet", "num_classes": 10},
        "data": {"dataset": "synthetic", "num_train": 96, "val_size": 0, "batch_size": 16} | data,
    }
    return Settings(tuple(flag for flag in TINY if "accumulate" not in flag), config)


def test_a_batch_that_a_mode_cannot_cut_is_refused_before_anything_runs() -> None:
    result = run_here("verify", "--modes=ddp", "--devices=3", *TINY, "--data.batch_size=16")
    assert result.status == 2
    assert "3 replicas" in result.stderr
    assert "reference" not in result.stdout + result.stderr


def test_all_leaves_out_what_cannot_cut_the_batch_or_the_network() -> None:
    said: list[str] = []
    kept = [mode.name for mode in _possible(chosen(["all"], devices=7), settings(), said.append, leave_out=True)]
    assert kept == ["single"]
    said_of = {line.split(":")[0].removeprefix("left out "): line for line in said}
    assert "7 replicas" in said_of["ddp"]
    assert "6 blocks" in said_of["pp"]
    kept = [mode.name for mode in _possible(chosen(["all"], devices=2), settings(), said.append, leave_out=True)]
    assert kept == list(modes(2))


def test_a_batch_that_one_device_cannot_train_on_is_never_left_out() -> None:
    with pytest.raises(ConfigError, match="has 1 of 97 images"):
        list(_possible(chosen(["all"], devices=2), settings(num_train=97), print, leave_out=True))


def test_what_only_a_run_of_the_mode_finds_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Outcome(2, "", "lit_cifar: error: no such thing\n  pass another", 1.0)
    verifier = Verifier(settings(), 3, tmp_path, print)
    monkeypatch.setattr(Verifier, "reference", lambda self, chunks: Reference(Record(tmp_path), [{}]))
    monkeypatch.setattr(Verifier, "launch", lambda self, mode, folder: refused)
    with pytest.raises(ConfigError, match="no such thing") as caught:
        verifier.row(modes(2)["ddp"])
    assert caught.value.remedy == "pass another"


def test_a_reference_that_takes_too_long_is_none(tmp_path: Path) -> None:
    said: list[str] = []
    verifier = Verifier(settings(), 3, tmp_path, said.append, timeout_s=0.2)
    with pytest.raises(ConfigError, match="time limit"):
        verifier.reference(Chunks())
    assert said[0] == "running  reference: one device"
    assert said[1].endswith(" s  reference: one device")


@pytest.mark.timeout(120)
def test_a_run_that_ends_early_is_refused(tmp_path: Path) -> None:
    shortened = settings()
    shortened = Settings(
        (*shortened.flags, "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"), shortened.config
    )
    with pytest.raises(ConfigError, match="after 1 of 2 steps"):
        Verifier(shortened, 2, tmp_path, print).reference(Chunks())


def test_runs_are_as_long_as_their_steps_take() -> None:
    assert "--trainer.max_epochs=-1" in settings().length_flags(steps=10, accumulation=1)


@pytest.fixture
def tf32() -> Iterator[list[Any]]:
    """Allowed during the test; what has the switches."""
    users = [torch.backends.cudnn, torch.backends.cuda.matmul]
    before = [user.allow_tf32 for user in users]
    for user in users:
        user.allow_tf32 = True
    yield users
    for user, allowed in zip(users, before, strict=True):
        user.allow_tf32 = allowed


def test_no_run_uses_tf32(tf32: list[Any], tmp_path: Path) -> None:
    Trace(str(tmp_path)).setup(None, None, "fit")  # type: ignore[arg-type]
    assert [user.allow_tf32 for user in tf32] == [False, False]


@pytest.mark.parametrize("status", [1, 2, None])
def test_a_run_that_breaks_down_has_caught_nothing(
    status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "reference", lambda self, chunks: Reference(Record(tmp_path), [{}]))
    monkeypatch.setattr(Verifier, "launch", lambda self, mode, folder, bug: Outcome(status, "", "AttributeError", 1.0))
    planted = bugs.BUGS["last-replica"]
    findings = _findings(Verifier(settings(), 3, tmp_path, print), [planted])
    assert [(finding.bug, finding.right) for finding in findings] == [(None, False), (planted, False)]
    assert all("broke" in _verdict(finding) for finding in findings)


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
        (["--steps=1"], "--steps=1"),
        (["--trainer.strategy=ddp"], "--trainer.strategy"),
        (["--trainer.max_epochs=1"], "--trainer.max_epochs"),
        (["--ckpt_path=last.ckpt"], "--ckpt_path"),
        (["--resume=auto"], "--resume"),
        (["--trainer.precision=bf16-mixed"], "bf16-mixed"),
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


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """Of every mode, with gradients accumulated and clipped and a ragged last batch."""
    return {row.mode: row for row in verify(list(modes(2)), devices=2, args=TINY)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", modes(2))
def test_every_mode_trains_what_one_device_trains(name: str, rows: dict[str, Row]) -> None:
    row = rows[name]
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
