"""The page about runs: what it says, what it refuses, and that a browser shows it without a complaint."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import browser_tab, chromium
from commands import TINY, Result, counts, launch, run_here

from lit_cifar.checkpoint.sample_audit.callback import write_epoch
from lit_cifar.reporting.evaluation_tables import write_confusion, write_per_rank
from lit_cifar.reporting.rank_statistics import AccuracyCount
from lit_cifar.reporting.run_reader import Confusion, read_run
from lit_cifar.tools.html_report.charts import COLORS, Line, line_chart, matrix_chart
from lit_cifar.tools.html_report.page import page_of
from lit_cifar.tools.html_report.tables import different_settings, names_of, repeat_command

CLASSES = ("cat", "dog")
ENVIRONMENT = {
    "started": "2026-11-20T11:32:10+00:00",
    "command": "python -m lit_cifar fit --run_dir=runs/first",
    "git": {"commit": "2584fce50ee9a21a7fc8eb008a4e05941ca16d61", "modified": False},
    "versions": {"torch": "2.15.0"},
    "cpu": {"model": "AMD EPYC", "cores": 2},
    "gpus": [],
    "data": "cats and dogs",
    "strategy": "ddp",
    "device": "cpu",
    "world_size": 2,
    "num_nodes": 1,
    "precision": "32-true",
}
CONFIG = {
    "trainer": {"strategy": "ddp", "devices": 2},
    "model": {"arch": "resnet10", "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}},
    "data": {"batch_size": 128},
}
METRICS = (
    "epoch,lr-SGD,step,train/images_per_s,train/loss,val/acc,val/loss\n"
    ",0.1,4,,,,\n0,,4,500.0,,,\n0,,9,,,0.5,1.75\n0,,9,,2.25,,\n1,,19,600.0,,,\n1,,19,,1.25,0.625,1.5\n"
)


def write_run(folder: Path, *, classes: Sequence[str] = CLASSES, **changes: Any) -> Path:
    """The folder of a run of two epochs of ten steps on two ranks; `changes` are of the environment."""
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT | changes))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "metrics.csv").write_text(METRICS)
    write_per_rank(folder, "val", [AccuracyCount(30, 50), AccuracyCount(32, 50)])
    write_confusion(folder, "val", classes, [[35, 15], [23, 27]])
    for epoch in range(2):
        write_epoch(folder, epoch, 10, 1280, f"digest{epoch}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


class Page(HTMLParser):
    """What a page is made of; an element that is not closed where it must be is an error.

    Attributes:
        text: All text, that of each element by itself.
        elements: The names of all elements, with their attributes.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data)

    def names(self) -> set[str]:
        return {name for name, _ in self.elements}

    def after(self, text: str) -> str:
        """The text that follows another one."""
        return self.text[self.text.index(text) + 1]


MARKER_CORNERS = {"circle": {8}, "square": {0}}


def markers(page: Page, run: str) -> set[int]:
    """How many curves the markers of a run have; bars are of a paler color."""
    style = f"fill: var(--{run})"
    return {str(one["d"]).count("C") for name, one in page.elements if name == "path" and one.get("style") == style}


def assert_refused(result: Result, *words: str) -> None:
    assert result.status == 2
    assert len(result.stderr.splitlines()) <= 5
    assert [word for word in words if word not in result.stderr] == []


# ---------------------------------------------------------------- what the page says


def test_a_run_is_summed_up(run: Path) -> None:
    page = Page(page_of([run]))
    assert page.after("command") == "fit"
    assert page.after("validation accuracy") == "62.00% of 100 (52.2% to 70.9%)"  # Wilson's interval of 62 in 100
    assert page.after("best validation") == "62.50%, the best of 2"
    assert page.after("training loss") == "1.2500"
    assert page.after("training") == "2 epochs, 20 steps"
    assert page.after("images per second") == "550, the median of 2"
    assert page.after("mode") == "ddp, 2 processes, 32-true"
    assert page.after("digest after the last").startswith("first")
    assert "digest1" in page.text
    assert "dog taken for cat, 23 of 50; cat taken for dog, 15 of 50" in page.text
    assert "test accuracy" not in page.text
    assert "Settings that differ" not in page.text


def test_markers_say_their_values_by_epoch(run: Path) -> None:
    page = Page(page_of([run]))
    assert "first, val/loss, epoch 1: 1.75" in page.text
    assert "first, val/acc, epoch 2: 62.5" in page.text
    assert "first, train/images_per_s, epoch 0.5: 500" in page.text


def test_an_evaluation_has_no_curve(run: Path) -> None:
    other = write_run(run.parent / "second", command="lit-cifar validate --ckpt_path=a.ckpt")
    (other / "metrics.csv").write_text("epoch,step,val/acc,val/loss\n0,0,0.5,1.75\n")
    (other / "receipt.csv").unlink()
    text = Page(page_of([run, other])).text
    assert "first, val/loss, epoch 1: 1.75" in text
    assert not any(words.startswith("second, val/") for words in text)
    assert "second: 30 of 50, 95 % interval 46.2% to 72.4%" in text  # its bars are there; Wilson's interval


def test_without_digests_the_axis_counts_steps(run: Path) -> None:
    (run / "receipt.csv").unlink()
    page = Page(page_of([run]))
    assert "first, val/loss, optimizer step 10: 1.75" in page.text
    assert "Samples" not in page.text


def test_runs_share_charts_and_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "fit") for name in ("slow", "fast")]
    write_per_rank(folders[1], "val", [AccuracyCount(62, 100)])
    config = yaml.safe_load((folders[1] / "config.yaml").read_text())
    config["model"]["optimizer"]["init_args"]["lr"] = 0.5
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    page = Page(page_of(folders))
    assert "2 runs" in page.text[0]
    assert page.after("--model.optimizer.lr") == "0.1"
    assert "--trainer.devices" not in page.text  # it does not differ
    assert "All runs used the same samples." in page.text
    styles = [str(attributes.get("style")) for name, attributes in page.elements if name == "path"]
    lines = {(color, "dasharray" in style) for style in styles for color in re.findall(r"stroke: var\(--(\w+)", style)}
    assert {("run0", False), ("run0", True), ("run1", False), ("run1", True)} <= lines
    of_run = {"run0": MARKER_CORNERS["circle"], "run1": MARKER_CORNERS["square"]}
    assert {run: markers(page, run) for run in of_run} == of_run
    assert page.text.count("rank 1") == 1  # of the run that has one


def test_many_runs_have_a_chart_for_training_and_one_for_validation(tmp_path: Path) -> None:
    page = Page(page_of([write_run(tmp_path / str(number)) for number in range(4)]))
    assert {"Training loss", "Validation loss", "Validation accuracy"} <= set(page.text)
    assert not any("dasharray" in str(attributes.get("style")) for _, attributes in page.elements)


def test_a_rank_beyond_chance_is_marked(run: Path) -> None:
    write_per_rank(run, "test", [AccuracyCount(900, 1000), AccuracyCount(895, 1000), AccuracyCount(800, 1000)])
    text = Page(page_of([run])).text
    assert "80.0% !" in text
    assert "90.0%" in text
    assert "! differs from the other ranks by more than chance explains" in text


def test_of_very_many_classes_the_hardest_are_shown(run: Path) -> None:
    names = [f"class {index}" for index in range(30)]
    rows = [[0] * 30 for _ in names]
    for index in range(29):  # the last has no images
        rows[index][index], rows[index][29] = 50 + index, 50 - index
    write_confusion(run, "val", names, rows)
    text = Page(page_of([run])).text
    assert "the 25 of 30 classes with the lowest accuracy" in text
    assert [name for name in names if name not in text] == names[25:]
    assert "class 0 taken for class 29, 50 of 100; class 1 taken for class 29, 49 of 100" in " ".join(text)


def test_of_very_many_ranks_the_marked_and_the_least_accurate_are_shown(run: Path) -> None:
    write_per_rank(run, "val", [AccuracyCount(900 + (rank * 7) % 30 - 500 * (rank == 40), 1000) for rank in range(60)])
    text = Page(page_of([run])).text
    assert "41.0% !" in text
    assert "25 of 60 ranks: marked ones and the least accurate" in " ".join(text)
    assert [name for name in text if name.startswith("rank ")][0:1] == ["rank 0"]
    assert sum(name.startswith("rank ") for name in text) == 25


NAMES = [
    "abc",
    ["cat", "a very long name"],
    ["ship"] * 29 + ["truck of steel"],
    [f"a very long name {n}" for n in range(25)],
]


@pytest.mark.parametrize("names", NAMES, ids=len)
def test_no_name_of_a_matrix_is_cut_off_or_covers_another(names: Sequence[str]) -> None:
    confusion = Confusion(tuple(names), tuple((1,) * len(names) for _ in names))
    chart = matrix_chart("x", confusion, range(len(names)), note=None)
    assert "</svg>" in chart.svg()
    whole = chart.figure.bbox
    for labels, low, high in ((chart.axes.get_xticklabels(), "x0", "x1"), (chart.axes.get_yticklabels(), "y0", "y1")):
        boxes = [label.get_window_extent() for label in labels]
        assert [label.get_text() for label, box in zip(labels, boxes, strict=True) if not contains(whole, box)] == []
        upright = [sorted((getattr(box, low), getattr(box, high))) for box in boxes if len(names) > 12]
        ends = sorted(upright)
        assert all(right[0] - left[1] >= -1.5 for left, right in pairwise(ends))


def contains(outer: Any, inner: Any) -> bool:
    return bool(outer.x0 <= inner.x0 <= inner.x1 <= outer.x1 and outer.y0 <= inner.y0 <= inner.y1 <= outer.y1)


def test_a_loss_that_is_not_finite_leaves_a_gap(run: Path) -> None:
    (run / "metrics.csv").write_text(METRICS.replace("2.25", "nan").replace("1.5\n", "inf\n"))
    page = page_of([run])
    assert "not shown: 2 values that are nan or infinite" in page
    assert not re.search(r'(?:d|x|y|transform)="[^"]*(?:nan|inf)', page)
    lines = [str(one["d"]) for name, one in Page(page).elements if name == "path" and "dash" in str(one.get("style"))]
    assert not any("L" in line for line in lines[:1])  # one point of the two is left


def test_a_folder_of_digests_alone_has_no_charts(run: Path) -> None:
    """A run that was stopped before its first log point and evaluation."""
    (run / "metrics.csv").write_text("epoch,step,train/loss\n")
    for name in ("per_rank.csv", "confusion.csv", "receipt.csv"):
        (run / name).unlink()
    page = Page(page_of([run]))
    assert "figure" not in page.names()
    assert "Repeat" in page.text


def test_a_line_that_is_being_written_is_left_out(run: Path) -> None:
    with (run / "metrics.csv").open("a") as file:
        file.write("2,,29,,0.9")
    assert read_run(run).metrics["train/loss"] == [(9, 2.25), (19, 1.25)]


# ---------------------------------------------------------------- one file that stands alone


HOSTILE = '<script>alert(\'1\')</script>&"x" onload="y'


def test_no_text_of_a_run_becomes_html(tmp_path: Path) -> None:
    """Class names, folder names, settings and commands are the user's, and the page is sent to others."""
    folder = write_run(
        tmp_path / HOSTILE.replace("/", "|"), classes=(HOSTILE, "dog"), command=HOSTILE, data=HOSTILE, strategy=HOSTILE
    )
    other = write_run(tmp_path / "other", classes=(HOSTILE, "dog"), data=HOSTILE)
    (other / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"data": {"batch_size": HOSTILE}}))
    page = Page(page_of([folder, other]))
    assert "script" not in page.names()
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count(HOSTILE) >= 4


def test_the_page_loads_nothing(run: Path) -> None:
    page = page_of([run, write_run(run.parent / "second")])
    elements = Page(page).elements
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {name for name, _ in elements}
    assert not {"src", "href", "xlink:href", "srcset", "id"} & {key for _, attributes in elements for key in attributes}
    assert not re.search(r"https?:|//|@import|url\(", page)
    policies = [attributes for _, attributes in elements if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert [policy["content"] for policy in policies] == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert len(page) < 100_000


def test_every_color_has_a_light_and_a_dark_value(run: Path) -> None:
    page = page_of([run, write_run(run.parent / "second")])
    light, dark = page.split("prefers-color-scheme: dark")
    defined = re.findall(r"(--[\w]+):", light)
    assert defined == [f"--{name}" for name in COLORS]
    assert re.findall(r"(--[\w]+): #", dark) == defined
    assert set(re.findall(r"var\((--\w+)\)", page)) <= set(defined)
    assert not re.search(r'(?:style|fill|stroke)="[^"]*#', page)  # no part of a chart has a color of its own


@pytest.mark.parametrize("name", [HOSTILE, "$\\frac{1}$", "\u732b", "a\x01b\nc", "\udce9"])
def test_any_name_of_a_class_can_be_drawn(name: str, run: Path) -> None:
    confusion = Confusion((name, "dog"), ((1, 2), (3, 4)))
    drawn = matrix_chart(name, confusion, [0, 1], note=None).svg()
    assert Page(drawn.encode(errors="replace").decode()).names() <= {"svg", "g", "path", "text", "title"}
    assert "\x01" not in re.sub(r"<title>[^<]*</title>|aria-label=.[^>]*", "", drawn)


# ---------------------------------------------------------------- names, differences, commands


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a"], ["a"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/a/fit", "runs/b/fit"], ["a", "b"]),
        (["runs/a/fit", "runs/b/test"], ["a/fit", "b/test"]),
        (["runs/a", "runs/a/b"], ["a", "a/b"]),
        (["a/x/a", "a/a"], ["x/a", "a"]),
    ],
)
def test_names_tell_folders_apart(folders: list[str], names: list[str]) -> None:
    assert names_of([Path(folder) for folder in folders]) == names


def test_settings_that_only_some_commands_have_do_not_differ(run: Path) -> None:
    other = write_run(run.parent / "second")
    config = {key: CONFIG[key] for key in ("trainer", "data")} | {"ckpt_path": "best.ckpt"}
    config["trainer"] = {"strategy": "PipelineStrategy", "devices": 2, "callbacks": ["a"]}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert different_settings([read_run(run), read_run(other)]) == {
        "trainer.strategy": ["ddp", "PipelineStrategy"],
        "trainer.callbacks": [None, '["a"]'],
    }


@pytest.mark.parametrize(
    ("command", "devices", "expected"),
    [
        ("python -m lit_cifar fit --run_dir=a", 2, "python -m lit_cifar fit --config {}"),
        ("lit-cifar fit", "auto", "python -m lit_cifar fit --config {} --trainer.devices=2"),
        ("lit-cifar fit --ckpt_path 'my w.pt' --x=1", 2, "python -m lit_cifar fit --config {} --ckpt_path 'my w.pt'"),
        ("lit-cifar fit --ckpt_path=w.pt", 2, "python -m lit_cifar fit --config {} --ckpt_path=w.pt"),
        ("lit-cifar test --ckpt_path=w.pt", 2, "python -m lit_cifar test --config {}"),  # it is in config.yaml
        ("train.py --epochs 3", 2, None),
    ],
)
def test_the_command_that_repeats_a_run(command: str, devices: object, expected: str | None, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my run", command=command, git=None)
    config = CONFIG | {"trainer": {"strategy": "ddp", "devices": devices}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = repeat_command(read_run(folder))
    assert found == (None if expected is None else expected.format(shlex.quote(f"{folder}/config.yaml")))


@pytest.mark.parametrize(
    ("values", "zero", "ticks"),
    [
        ([0.21, 0.44], False, ["0.2", "0.25", "0.3", "0.35", "0.4", "0.45"]),
        ([1.5, 5.7], False, ["1", "2", "3", "4", "5", "6"]),
        ([160, 733], True, ["0", "200", "400", "600", "800"]),
        ([-0.3, 0.3], False, ["-0.4", "-0.2", "0", "0.2", "0.4"]),
        ([0.0, 0.0], False, None),
        ([2e6], False, None),
        ([1e300, -1e300], False, None),
    ],
)
def test_ticks_are_round_and_hold_all_values(values: list[float], zero: bool, ticks: list[str] | None) -> None:
    line = Line("a", 0, [(index + 1, value) for index, value in enumerate(values)])
    chart = line_chart("x", [line], x_name="epoch", y_name="y", text=lambda value: f"{value:.4g}", zero=zero, note=None)
    assert "</svg>" in chart.svg()
    low, high = chart.axes.get_ylim()
    assert low <= min(values) <= max(values) <= high
    found = [label.get_text().replace("\N{MINUS SIGN}", "-") for label in chart.axes.get_yticklabels()]
    assert ticks is None or found == ticks
    assert all(label.get_text().isdecimal() for label in chart.axes.get_xticklabels())


# ---------------------------------------------------------------- what is refused


def spoil(name: str, old: str, new: str) -> Any:
    """A change of a file of the run."""

    def change(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return change


SPOILT = {
    "no metrics": (lambda run: (run / "metrics.csv").unlink(), ["has no metrics.csv", "`predict`"]),
    "no configuration": (lambda run: (run / "config.yaml").unlink(), ["has no config.yaml"]),
    "no environment": (lambda run: (run / "environment.json").unlink(), ["has no environment.json"]),
    "a cut environment": (spoil("environment.json", "}", ""), ["environment.json is damaged: it is not JSON"]),
    "an empty environment": (
        lambda run: (run / "environment.json").write_text("{}"),
        ["environment.json is damaged: it says nothing of started, command"],
    ),
    "a list": (lambda run: (run / "config.yaml").write_text("[1]"), ["config.yaml is damaged", "names and values"]),
    "no YAML": (lambda run: (run / "config.yaml").write_bytes(b"\xff\x00{"), ["config.yaml is damaged"]),
    "a word": (spoil("metrics.csv", "2.25", "abc"), ["metrics.csv is damaged: line 5: train/loss is 'abc'"]),
    "a step": (spoil("metrics.csv", ",,19,,1.25", ",,x,,1.25"), ["line 7: step is 'x', not a whole number"]),
    "cells": (spoil("metrics.csv", "0,,4,500.0", "0,,4,7,500.0"), ["line 3 has 8 cells, and the first has 7"]),
    "quotes": (spoil("metrics.csv", "2.25", '2"2"5"\n"'), ["metrics.csv is damaged: line"]),
    "no steps": (spoil("metrics.csv", "step", "stop"), ["must name the columns step"]),
    "empty": (lambda run: (run / "metrics.csv").write_text(""), ["metrics.csv is damaged: its first line must name"]),
    "too many": (spoil("per_rank.csv", "30,50", "60,50"), ["per_rank.csv is damaged: line 2: not a count: 60"]),
    "a sum": (spoil("per_rank.csv", "all,62", "all,63"), ["line 4: it is not the sum of the 2 ranks"]),
    "a rank": (spoil("per_rank.csv", "val,1,", "val,2,"), ["line 3: rank 2 where rank 1 must be"]),
    "a cut table": (spoil("per_rank.csv", "0.620000\n", "0.62"), ["per_rank.csv is damaged: its last line"]),
    "a class": (spoil("confusion.csv", "val,dog", "val,dig"), ["confusion.csv is damaged: line 3: class 'dig'"]),
    "a class less": (spoil("confusion.csv", "val,dog,23,27\n", ""), ["val has 1 lines for 2 classes"]),
    "less than none": (spoil("confusion.csv", "15", "-1"), ["line 2: dog is '-1', not a whole number"]),
    "digests": (spoil("receipt.csv", "steps", "stops"), ["receipt.csv is damaged: its first line must name"]),
}


@pytest.mark.parametrize(("change", "words"), SPOILT.values(), ids=SPOILT.keys())
def test_a_damaged_folder_is_refused(change: Any, words: list[str], run: Path) -> None:
    change(run)
    assert_refused(run_here("report", run, f"--output={run / 'page.html'}"), str(run), *words)
    assert not (run / "page.html").exists()


def test_a_file_and_a_folder_that_is_missing_are_refused(run: Path) -> None:
    assert_refused(run_here("report", run / "metrics.csv"), "metrics.csv is a file, not the folder of a run", "fit")
    assert_refused(run_here("report", run / "no"), "does not exist")


def test_runs_of_different_data_are_refused(run: Path) -> None:
    other = write_run(run.parent / "birds", data="birds")
    words = ["first has cats and dogs", "birds has birds", f"python -m lit_cifar report {other}"]
    assert_refused(run_here("report", run, other), "different data", *words)
    pictures = write_run(run.parent / "pictures", classes=("cat", "bird"))
    assert_refused(run_here("report", run, pictures), "different classes", "has cat, dog", "has cat, bird")


def test_a_run_given_twice_is_refused(run: Path) -> None:
    assert_refused(run_here("report", run, f"{run}/../first"), "is given twice")


def test_a_page_that_cannot_be_written_is_refused(run: Path) -> None:
    assert_refused(run_here("report", run, f"--output={run}"), f"--output={run} cannot be written", "another file")


def test_no_run_is_refused() -> None:
    assert_refused(run_here("report"), "RUN", "report --help")


# ---------------------------------------------------------------- real runs, and a browser


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was interrupted and resumed, the command that the page gives for it, and a test."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: folder / name for name in ("fit", "again", "test")}
    flags = ["fit", *TINY, f"--run_dir={runs['fit']}", "--trainer.max_epochs=2"]
    with pytest.raises(RuntimeError, match="stopped before epoch 1"):
        run_as_typed(*flags, "--trainer.callbacks+=recorder.StopBefore", "--trainer.callbacks.epoch=1")
    assert run_as_typed(*flags, "--resume=auto").status == 0
    checkpoint = f"--ckpt_path={runs['fit'] / 'checkpoints' / 'best.ckpt'}"
    assert run_as_typed("test", *TINY, checkpoint, f"--run_dir={runs['test']}").status == 0
    return runs


def run_as_typed(*args: str) -> Result:
    """In this process, which takes the command for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lit-cifar", *args])
        return run_here(*args)


def test_the_counts_of_a_run_are_in_its_folder(real: dict[str, Path]) -> None:
    """Also of one that draws no figures, and of the latest evaluation alone."""
    for name, split in (("fit", "val"), ("test", "test")):
        found = read_run(real[name])
        confusion = found.confusion[split]
        right = sum(row[index] for index, row in enumerate(confusion.counts))
        assert (right, sum(map(sum, confusion.counts))) == counts(real[name], split)["all"]
        assert found.metrics[f"{split}/acc"][-1][1] == pytest.approx(right / sum(map(sum, confusion.counts)))


def test_a_resumed_run_and_its_test_make_a_page(real: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    result = run_here("report", real["fit"], real["test"], f"--output={target}")
    assert (result.status, result.stderr) == (0, "")
    assert result.stdout.startswith(f"wrote {target}, ")
    page = Page(target.read_text())
    assert page.after("training") == "2 epochs, 10 steps"
    assert "Accuracy by class, test" in page.text
    assert "--ckpt_path" in page.text


def test_the_command_of_the_page_repeats_the_run(real: dict[str, Path]) -> None:
    command = repeat_command(read_run(real["fit"]))
    assert command is not None
    words = shlex.split(command.splitlines()[-1])
    assert words[:3] == ["python", "-m", "lit_cifar"]
    assert run_here(*words[3:], f"--run_dir={real['again']}").status == 0
    first, again = (read_run(real[name]) for name in ("fit", "again"))
    assert again.epochs == first.epochs
    assert again.settings == first.settings
    assert again.metrics["train/loss_step"] == first.metrics["train/loss_step"]
    assert again.confusion == first.confusion


def test_a_class_that_is_new_drops_the_rows_of_other_classes(tmp_path: Path) -> None:
    write_confusion(tmp_path, "val", CLASSES, [[1, 0], [0, 1]])
    write_confusion(tmp_path, "test", CLASSES, [[2, 0], [0, 2]])
    write_confusion(tmp_path, "val", CLASSES, [[3, 0], [0, 3]])
    rows = ["split,class,cat,dog", "test,cat,2,0", "test,dog,0,2", "val,cat,3,0", "val,dog,0,3"]
    assert (tmp_path / "confusion.csv").read_text().splitlines() == rows
    write_confusion(tmp_path, "test", ("cow",), [[5]])
    assert (tmp_path / "confusion.csv").read_text().splitlines() == ["split,class,cow", "test,cow,5"]


needs_browser = pytest.mark.skipif(
    chromium() is None, reason="no Chromium: install one, or name it by the environment variable CHROMIUM"
)
BROKEN = {
    "a script": "<script>undefined_name()</script>",
    "a file that is not there": "<img src='no_such.png'>",
    "an address": "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\"><img src='https://x.test'>",
}


@needs_browser
def test_a_browser_shows_the_page_without_a_complaint(real: dict[str, Path], tmp_path: Path) -> None:
    """In both looks, and on a phone, where nothing but tables and commands scrolls sideways."""
    target, long_name = tmp_path / "page.html", tmp_path / ("long" * 30)
    shutil.copytree(real["fit"], long_name, ignore=shutil.ignore_patterns("checkpoints", "events*"))
    assert run_here("report", real["fit"], real["test"], long_name, f"--output={target}").status == 0
    grounds = set()
    with browser_tab(tmp_path / "profile") as tab:
        for width in (360, 1280):
            for scheme in ("light", "dark"):
                tab.open(target, width=width, scheme=scheme)
                assert tab.value("document.querySelectorAll('figure svg').length") >= 6
                assert tab.value("document.documentElement.scrollWidth") <= width
                grounds.add(tab.value("getComputedStyle(document.body).backgroundColor"))
                smallest = (
                    "Math.min(...[...document.querySelectorAll('text')].map(t => t.getBoundingClientRect().height))"
                )
                assert tab.value(smallest) >= 9  # pixels, also on the phone
                edges = "t.getBoundingClientRect().right > t.ownerSVGElement.getBoundingClientRect().right + 1"
                assert tab.value(f"[...document.querySelectorAll('svg text')].filter(t => {edges}).length") == 0
        assert tab.problems == []
    assert len(grounds) == 2


@needs_browser
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_the_browser_would_complain(content: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><title>x</title>{content}")
    with browser_tab(tmp_path / "profile") as tab:
        tab.open(page)
        assert len(tab.problems) == 1


@pytest.mark.slow
def test_processes_count_together(real: dict[str, Path], tmp_path: Path) -> None:
    """In the modes in which ranks have parts of the images, of the network, or of its tensors."""
    expected = read_run(real["test"]).confusion
    for mode in ("ddp", "pp", "tp"):
        flags = [f"--ckpt_path={real['fit'] / 'checkpoints' / 'best.ckpt'}", f"--run_dir={tmp_path / mode}"]
        launch("test", *TINY, f"--trainer.strategy={mode}", "--trainer.devices=2", *flags, ranks=2)
        assert read_run(tmp_path / mode).confusion == expected
