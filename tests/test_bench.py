"""`python -m lit_cifar bench`: what is timed in turn, the sections and their rows, and the command."""

import json
import socket
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import TINY, run_here
from short_fits import data, fit, short
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lit_cifar import LitResNet
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.errors import ConfigError
from lit_cifar.tools.bench import data_path, mode_speed, overhead, recovery
from lit_cifar.tools.bench.measurements import (
    Quantiles,
    Row,
    Settings,
    difference,
    interleaved,
    markdown,
    ratio,
    result_table,
    shown,
)
from lit_cifar.tools.bench.overhead import write_random_cifar10
from lit_cifar.tools.bench.plain_loop import PlainLoop, Small
from lit_cifar.tools.bench.recovery import Recovery
from lit_cifar.tools.bench.timed_runs import Interleaved, TimedRun, interleaved_runs

command = import_module("lit_cifar.tools.commands.bench")  # whose name in its package is the function


def small_settings(folder: Path, *, rounds: int = 2) -> Settings:
    return Settings(device=torch.device("cpu"), folder=folder, rounds=rounds, small=True)


def row(*values: float, **kwargs: object) -> Row:
    return Row(section="modes", name="a against b", unit="x", found=Quantiles(values), **kwargs)  # type: ignore[arg-type]


def test_quantiles_are_a_median_and_the_middle_half() -> None:
    spread = Quantiles((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (spread.low, spread.median, spread.high, spread.n) == (2.0, 3.0, 4.0, 5)
    assert (Quantiles((7.0,)).low, Quantiles((7.0,)).high) == (7.0, 7.0)


def test_things_are_timed_in_turn_and_every_other_round_backwards() -> None:
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name) or float(len(called))) for name in "ab"}
    found = interleaved(calls, rounds=3)
    assert called == [*"ab", *"ba", *"ab"]
    assert found == {"a": Quantiles((1.0, 4.0, 5.0)), "b": Quantiles((2.0, 3.0, 6.0))}


def test_ratios_are_of_each_round() -> None:
    """A machine that is slower in one round is slower for both."""
    found = interleaved({"a": iter([2.0, 20.0]).__next__, "b": iter([1.0, 10.0]).__next__}, rounds=2)
    assert ratio(found["a"], found["b"]) == Quantiles((2.0, 2.0))
    assert difference(found["a"], found["b"]) == Quantiles((1.0, 10.0))
    with pytest.raises(ValueError, match="zip"):
        ratio(Quantiles((1.0,)), Quantiles((1.0, 2.0)))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.9168, "x", "0.917x"), (0.12345, "%", "12.3 %"), (34567.0, "img/s", "34,600 img/s"), (250.0, "us", "250 us")],
)
def test_three_digits_and_the_unit(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text  # type: ignore[arg-type]


def test_a_row_stands_in_the_table_with_its_note() -> None:
    found = [row(1.0, 1.1, 1.2, note="all-reduce [a] takes 76 ms"), row(3.0)]
    assert markdown(found).splitlines()[2:] == [
        "| a against b. all-reduce [a] takes 76 ms | 1.10x | 1.05x to 1.15x | 3 |",
        "| a against b | 3.00x | 3.00x to 3.00x | 1 |",
    ]
    assert result_table(found, title="modes").row_count == 2
    content = found[0].to_json()
    assert (content["median"], content["values"]) == (1.1, [1.0, 1.1, 1.2])
    assert [Row.from_json(each.to_json()) for each in found] == found


# The data path -----------------------------------------------------------------------------------------------------


def test_the_data_path_is_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    monkeypatch.setattr(data_path, "_seconds", lambda batches: seen.append(torch.get_num_threads()) or len([*batches]))
    settings = small_settings(tmp_path)
    rows = data_path.measure(settings, lambda line: None)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert set(seen) == {1}
    # This clock counts batches: 16 of the baseline, an epoch of 32 of ours, each divided by its images.
    assert [(row.unit, row.found.median) for row in rows] == [("x", 1.0), ("img/s", 128), ("img/s", 128), ("%", 0.0)]


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
    for batches in (made["baseline"], made["ours"]):
        found = torch.cat(batches)
        assert len(batches) == 2
        places = torch.cdist(found.flatten(1), expected.flatten(1)).argmin(1)
        assert places.sort().values.equal(torch.arange(64))
        torch.testing.assert_close(found, expected[places])
    assert {batch.dtype for batch in made["uint8"]} == {torch.uint8}


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


def test_turns_of_a_fit_and_of_a_plain_loop(tmp_path: Path) -> None:
    flags = [
        "--model.network=lit_cifar.tools.bench.plain_loop.Small",
        "--data.dataset=synthetic",
        "--data.num_train=96",
    ]
    flags += ["--data.val_size=0", "--data.batch_size=8", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    flags += [
        "--trainer.callbacks+=lit_cifar.tools.bench.plain_loop.InTurn",
        f"--trainer.callbacks.file={tmp_path / 'turns'}",
    ]
    flags += ["--trainer.callbacks.steps=3", f"--run_dir={tmp_path / 'run'}"]
    assert run_here("fit", *flags).status == 0
    turns = json.loads((tmp_path / "turns").read_text())
    assert len(turns) == 12 / 3 - 2
    assert all(0 < seconds < 1 for turn in turns for clock in turn for seconds in clock)


def test_times_between_epochs(tmp_path: Path) -> None:
    flags = [
        "--trainer.callbacks+=lit_cifar.tools.bench.plain_loop.EpochTimes",
        f"--trainer.callbacks.file={tmp_path / 'times'}",
    ]
    assert run_here("fit", *TINY, *flags, "--trainer.max_epochs=4", f"--run_dir={tmp_path / 'run'}").status == 0
    times = json.loads((tmp_path / "times").read_text())
    assert len(times["outside_s"]) == 2  # of three changes the first is left out
    assert all(0 < seconds < 10 for seconds in [*times["outside_s"], times["step_s"]])


def test_the_noise_is_read_as_cifar10(tmp_path: Path) -> None:
    write_random_cifar10(tmp_path)
    images = CIFAR10DataModule(tmp_path)
    images.prepare_data()
    images.setup("fit")
    assert len(images.sets["train"]) == 45_000


def test_the_time_of_a_recovery_is_divided_without_rest() -> None:
    found = Recovery(killed=1.0, ended=1.5, started=2.25, imported=5.0, stepped=7.0, ours_cpu_s=1.0)
    assert (found.total_s, found.ours_s, found.torchrun_s, found.imports_s) == (6.0, 2.5, 0.75, 2.75)


@pytest.mark.slow
def test_rows_of_overhead(tmp_path: Path) -> None:
    rows = overhead.measure(small_settings(tmp_path), lambda line: None)
    assert [row.unit for row in rows] == ["us", "us", "x", "%", "s"]
    assert 0.5 < rows[2].found.median < 20


@pytest.mark.slow
def test_rows_of_recovery(tmp_path: Path) -> None:
    rows = recovery.measure(small_settings(tmp_path), lambda line: None)
    total, ours, ending, _, torchrun, imports = (row.found.values for row in rows)
    assert len(total) == 2
    assert all(0 < part < whole for part, whole in zip(ending, ours, strict=True))
    assert [sum(parts) for parts in zip(ours, torchrun, imports, strict=True)] == pytest.approx(total)


# Runs that wait for their turn ----------------------------------------------------------------------------------------


def test_a_run_takes_only_the_steps_that_it_is_allowed() -> None:
    steps: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        turns: Any = Interleaved(server.getsockname()[1], "ddp")

        def train() -> None:
            turns.on_train_start(SimpleNamespace(global_rank=1), None)
            for step in range(4):
                turns.on_train_batch_start(None, None, None, step)
                steps.append(step)

        trains = Thread(target=train)
        trains.start()
        with server.accept()[0] as connection:
            line = connection.makefile("rw")
        assert json.loads(line.readline()) == {"name": "ddp", "rank": 1}
        assert len(json.loads(line.readline())) == 1  # the first batch is there, and no step has been allowed
        assert steps == []
        line.write("3\n")
        line.flush()
        began = json.loads(line.readline())
        line.close()
        trains.join()
        turns._file.close()
    assert steps[:3] == [0, 1, 2]
    assert len(began) == 4  # the beginnings of the three steps, and the end of the last
    assert began == sorted(began)


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
    settings = small_settings(tmp_path, rounds=1)
    rows = mode_speed.measure(settings, lambda line: None)
    assert [row.unit for row in rows] == [*["x"] * 6, "img/s"] * 2
    assert all(row.found.median > 0 for row in rows)


# The command ----------------------------------------------------------------------------------------------------------


def one_row(settings: Settings, report: object) -> list[Row]:
    assert settings.folder.is_dir()
    return [row(float(settings.rounds))]


def test_the_command_prints_and_writes_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SECTIONS", {"modes": one_row, "data": one_row})
    files = [tmp_path / name for name in ("bench.json", "bench.md")]
    options = [f"--{name}={file}" for name, file in zip(("json", "markdown"), files, strict=True)]
    done = run_here("bench", "modes", "--rounds=3", *options)
    assert done.status == 0, done.stderr
    assert "3.00x" in done.stdout
    content = json.loads(files[0].read_text())
    assert [found["median"] for found in content["rows"]] == [3.0]
    assert {"versions", "cpu", "git", "command"} <= set(content)
    assert "| a against b | 3.00x |" in files[1].read_text()


def test_all_is_every_section_in_its_order() -> None:
    assert command._sections(["all"]) == list(command.SECTIONS)
    assert command._sections(["modes"]) == ["modes"]


@pytest.mark.parametrize(
    ("words", "text"),
    [(["speed"], "no section 'speed'"), (["--rounds=0"], "--rounds=0")],
)
def test_a_mistake_has_a_remedy(words: list[str], text: str) -> None:
    done = run_here("bench", *words)
    assert done.status == 2
    assert text in done.stderr


def test_a_section_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(settings: Settings, report: object) -> list[Row]:
        raise ConfigError("no", remedy="yes")

    monkeypatch.setattr(command, "SECTIONS", {"data": fails})
    assert run_here("bench", "data").status == 2
