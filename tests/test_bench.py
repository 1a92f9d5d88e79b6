"""`python -m lit_cifar bench`: what is timed in turn, its rows, and the command."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from commands import run_here

from lit_cifar.bench import baseline, data_path
from lit_cifar.bench.rows import Row, markdown, result_table, shown
from lit_cifar.bench.sections import SECTIONS
from lit_cifar.bench.settings import Settings
from lit_cifar.bench.timing import Spread, difference, in_turn, measured_in_turn, ratio
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.errors import ConfigError

command = import_module("lit_cifar.commands.bench")  # whose name in its package is the function


def row(*values: float, **kwargs: object) -> Row:
    return Row(section="modes", name="a against b", unit="x", found=Spread(values), **kwargs)  # type: ignore[arg-type]


def test_a_spread_is_a_median_and_the_middle_half() -> None:
    spread = Spread((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (spread.low, spread.median, spread.high, spread.n) == (2.0, 3.0, 4.0, 5)
    assert (Spread((7.0,)).low, Spread((7.0,)).high) == (7.0, 7.0)


def test_things_are_timed_in_turn_and_every_other_round_backwards() -> None:
    called: list[str] = []
    now = iter(range(100))
    calls = {name: (lambda name=name: called.append(name)) for name in "ab"}
    found = in_turn(calls, rounds=3, warmup=1, clock=lambda: float(next(now)))
    assert called == ["a", "b", *"ab", *"ba", *"ab"]
    assert found == {"a": Spread((1.0,) * 3), "b": Spread((1.0,) * 3)}


def test_the_clock_waits_for_queued_work() -> None:
    called: list[str] = []
    in_turn({"a": lambda: called.append("a")}, rounds=1, warmup=0, wait=lambda: called.append("wait"))
    assert called == ["wait", "a", "wait"]


def test_ratios_are_of_each_round() -> None:
    """A machine that is slower in one round is slower for both."""
    found = measured_in_turn({"a": iter([2.0, 20.0]).__next__, "b": iter([1.0, 10.0]).__next__}, rounds=2)
    assert ratio(found["a"], found["b"]) == Spread((2.0, 2.0))
    assert difference(found["a"], found["b"]) == Spread((1.0, 10.0))
    with pytest.raises(ValueError, match="zip"):
        ratio(Spread((1.0,)), Spread((1.0, 2.0)))


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


def test_the_articles_loop_trains() -> None:
    data = CIFAR10DataModule(dataset="synthetic", num_train=64, val_size=0)
    data.setup("fit")
    images = data.sets["train"]
    batches = baseline.loader(images, batch_size=32, mean=data.source.mean, std=data.source.std)
    assert len(batches) == 2
    network = torch.nn.Sequential(torch.nn.AvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(48, 10))
    step = baseline.training_step(network, baseline.forever(batches), torch.device("cpu"))
    losses = [step() for _ in range(30)]
    assert losses[-1] < losses[0]


# The data path -----------------------------------------------------------------------------------------------------


def test_the_data_path_is_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    monkeypatch.setattr(data_path, "_seconds", lambda batches: seen.append(torch.get_num_threads()) or len([*batches]))
    settings = Settings(device=torch.device("cpu"), folder=tmp_path, rounds=2, small=True)
    rows = data_path.measure(settings, lambda line: None)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert set(seen) == {1}
    # This clock counts batches: 16 of the baseline, an epoch of 32 of ours, each divided by its images.
    assert [(row.unit, row.found.median) for row in rows] == [("x", 1.0), ("img/s", 128), ("img/s", 128), ("%", 0.0)]


def test_the_data_paths_make_the_same_kind_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without chance in them they make the same images."""
    monkeypatch.setattr(baseline.transforms, "RandomCrop", lambda size, padding: lambda image: image)
    monkeypatch.setattr(baseline.transforms, "RandomHorizontalFlip", lambda: lambda image: image)
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
    assert command._sections(["all"]) == list(SECTIONS)
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
