"""`python -m lit_cifar bench`: what is timed in turn, the sections and their rows, and the command."""

import json
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import TINY, run_here
from short_fits import data, fit, short
from torch.distributed import TCPStore
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lit_cifar import LitResNet
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.tools.bench import data_path, mode_speed, overhead, recovery
from lit_cifar.tools.bench.measurements import Row, Settings, interleaved, shown
from lit_cifar.tools.bench.overhead import PlainLoop, Small
from lit_cifar.tools.bench.timed_runs import Interleaved, TimedRun, interleaved_runs

command = import_module("lit_cifar.tools.commands.bench")  # whose name in its package is the function


def test_things_are_timed_in_turn_and_every_other_round_backwards() -> None:
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name) or float(len(called))) for name in "ab"}
    found = interleaved(calls, rounds=3)
    assert called == [*"ab", *"ba", *"ab"]
    assert {name: values.tolist() for name, values in found.items()} == {"a": [1, 4, 5], "b": [2, 3, 6]}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.9168, "x", "0.917x"), (34567.0, "img/s", "34,600 img/s"), (250.0, "us", "250 us"), (7.0, "s", "7.00 s")],
)
def test_three_digits_and_the_unit(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text  # type: ignore[arg-type]


# The data path -----------------------------------------------------------------------------------------------------


def test_the_data_path_is_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    monkeypatch.setattr(data_path, "_seconds", lambda batches: seen.append(torch.get_num_threads()) or len([*batches]))
    rows = data_path.measure(Settings(folder=tmp_path, rounds=2, small=True))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert set(seen) == {1}
    # This clock counts batches: 16 of the baseline, an epoch of 32 of ours, each divided by its images.
    assert [(row.unit, row.values.tolist()) for row in rows] == [
        ("x", [1.0, 1.0]),
        ("img/s", [128.0, 128.0]),
        ("img/s", [128.0, 128.0]),
    ]


def test_the_data_paths_make_the_same_kind_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without chance in them they make the same images."""
    monkeypatch.setattr(data_path.transforms, "RandomCrop", lambda size, padding: lambda image: image)
    monkeypatch.setattr(data_path.transforms, "RandomHorizontalFlip", lambda: lambda image: image)
    data = CIFAR10DataModule(dataset="synthetic", num_train=64, val_size=0, batch_size=32, augment=False)
    data.setup("fit")
    made: dict[str, list[torch.Tensor]] = {}
    for name, call in data_path.paths(data).items():
        monkeypatch.setattr(
            data_path, "_seconds", lambda batches, name=name: made.update({name: [batch[0] for batch in batches]}) or 1
        )
        call()
    expected = data.on_after_batch_transfer(Batch(*([data.sets["train"].images] * 3), 1.0), 0).images
    for batches in made.values():
        found = torch.cat(batches)
        assert len(batches) == 2
        places = torch.cdist(found.flatten(1), expected.flatten(1)).argmin(1)
        assert places.sort().values.equal(torch.arange(64))
        torch.testing.assert_close(found, expected[places])


# What fit adds, and recovery ------------------------------------------------------------------------------------------


@short
def test_the_plain_loop_computes_what_fit_computes(tmp_path: Path) -> None:
    """Else it would be no measure: the same weights, bit for bit, and the same mean loss."""
    network, twin = Small(), Small()
    twin.load_state_dict(network.state_dict())
    module = LitResNet(
        network=network,
        optimizer=lambda params: SGD(params, lr=0.1),
        lr_scheduler=lambda optimizer: StepLR(optimizer, 1000),
    )
    images = data()
    images.setup("fit")
    loop = PlainLoop(twin, module, images, log_every_n_steps=2)
    loop.run(2)
    trainer = fit(module, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), twin.parameters(), strict=True))
    ((loss, accuracy),) = loop.logged
    assert loss == pytest.approx(float(trainer.callback_metrics["train/loss"]))
    assert accuracy == pytest.approx(float(trainer.callback_metrics["train/acc"]))


def test_rows_of_overhead(tmp_path: Path) -> None:
    rows = overhead.measure(Settings(folder=tmp_path, rounds=2, small=True))
    assert [(row.unit, len(row.values)) for row in rows] == [("us", 2), ("x", 2)]
    assert all(0 < value < 100 for value in rows[1].values)


@pytest.mark.slow
def test_rows_of_recovery(tmp_path: Path) -> None:
    total, *parts = recovery.measure(Settings(folder=tmp_path, rounds=2, small=True))
    assert len(total.values) == 2
    assert all((part.values >= 0).all() for part in parts)
    np.testing.assert_allclose(sum(part.values for part in parts), total.values)


# Runs that wait for their turn ----------------------------------------------------------------------------------------


def test_a_run_takes_only_the_steps_that_it_is_allowed() -> None:
    steps: list[int] = []
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    turns: Any = Interleaved(store.port, "ddp")

    def train() -> None:
        trainer = SimpleNamespace(global_rank=1)
        turns.on_train_start(trainer, None)
        for step in range(4):
            turns.on_train_batch_start(trainer, None, None, step)
            steps.append(step)

    trains = Thread(target=train)
    trains.start()
    assert len(json.loads(store.get("ddp/0/1"))) == 1  # the first batch is there, and no step has been allowed
    assert steps == []
    store.set("ddp/1", "3")
    began = json.loads(store.get("ddp/1/1"))
    assert steps == [0, 1, 2]
    assert len(began) == 4  # the beginnings of the three steps, and the end of the last
    assert began == sorted(began)
    store.set("ddp/2", "1")
    trains.join()


def test_a_fit_that_fails_is_named(tmp_path: Path) -> None:
    broken = TimedRun(flags=[*TINY, "--data.batch_size=7", "--trainer.devices=2", "--trainer.strategy=ddp"])
    with (
        pytest.raises(RuntimeError, match="fit broken has ended while it was timed"),
        interleaved_runs({"broken": broken}, folder=tmp_path),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row_of_a_tiny_network(tmp_path: Path) -> None:
    rows = mode_speed.measure(Settings(folder=tmp_path, rounds=1, small=True))
    assert [row.unit for row in rows] == [*["x"] * 6, "img/s"] * 2
    assert all(row.values > 0 for row in rows)


# The command ----------------------------------------------------------------------------------------------------------


def one_row(settings: Settings) -> list[Row]:
    assert settings.folder.is_dir()
    return [Row("a [b] against c", "x", np.array([5.0, 1.0, 2.0, 4.0, float(settings.rounds)]), note="a note")]


@pytest.mark.parametrize(("words", "sections"), [(["modes"], ["modes"]), ([], ["modes", "data"])])
def test_the_command_prints_and_writes_what_was_measured(
    words: list[str], sections: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SECTIONS", {"modes": one_row, "data": one_row})
    done = run_here("bench", *words, "--rounds=3", f"--json={tmp_path / 'bench.json'}")
    assert done.status == 0, done.stderr
    shown = [line.strip() for line in done.stdout.splitlines() if "a [b] against c" in line or "a note" in line]
    assert [line.split("  ")[-1].strip() for line in shown] == ["3.00x", "2.00x to 4.00x, n = 5"] * len(sections)
    content = json.loads((tmp_path / "bench.json").read_text())
    assert [row["section"] for row in content["rows"]] == sections
    for row in content["rows"]:
        assert (row["low"], row["median"], row["high"], row["values"]) == (2.0, 3.0, 4.0, [5.0, 1.0, 2.0, 4.0, 3.0])
    assert {"versions", "cpu", "git", "command"} <= set(content)
