"""The page about runs: what it says, what it refuses, and that it stands alone."""

import json
import re
import shlex
import sys
import xml.etree.ElementTree as ET
from base64 import b64decode
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import TINY, Result, callback, counts, refused, run_here

from lit_cifar.checkpoint.sample_audit import write_epoch
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.evaluation_tables import write_confusion, write_per_rank
from lit_cifar.reporting.figures import confusion_figure, shortened
from lit_cifar.reporting.rank_statistics import AccuracyCount
from lit_cifar.tools.report import page
from lit_cifar.tools.report.charts import image_of
from lit_cifar.tools.report.page import different_settings, page_of, repeat_command
from lit_cifar.tools.report.run_reader import read_run

CLASSES = ("cat", "dog")
MATRIX = [[35, 15], [23, 27]]
ENVIRONMENT: dict[str, Any] = {
    **{"started": "2026-11-20T11:32:10+00:00", "command": "python -m lit_cifar fit --run_dir=runs/first"},
    **{"git": {"commit": "2584fce50ee9a21a7fc8eb008a4e05941ca16d61"}, "versions": {"torch": "2.15.0"}},
    **{"cpu": {"model": "AMD EPYC", "cores": 2}, "gpus": [], "data": "cats and dogs", "strategy": "ddp"},
    **{"device": "cpu", "world_size": 2, "num_nodes": 1, "precision": "32-true"},
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


def write_run(
    folder: Path, *, classes: Sequence[str] = CLASSES, matrix: Any = MATRIX, config: Any = CONFIG, **changes: Any
) -> Path:
    """The folder of a run of two epochs of ten steps on two ranks; `changes` are of the environment."""
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT | changes))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.csv").write_text(METRICS)
    write_per_rank(folder, "val", [AccuracyCount(30, 50), AccuracyCount(32, 50)])
    write_confusion(folder, "val", classes, matrix)
    for epoch in range(2):
        write_epoch(folder, epoch, 10, 1280, f"digest{epoch}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


class Page(HTMLParser):
    """What a page is made of; an element that is not closed where it must be is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []  # of each element by itself, and of its charts
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "img":
            kind, _, content = str(dict(attrs)["src"]).partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.text += [text for text in ET.fromstring(b64decode(content)).itertext() if text.strip()]
        elif tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data.strip())

    def after(self, text: str) -> str:
        """The text that follows another one."""
        return self.text[self.text.index(text) + 1]


def test_a_run_is_summed_up(run: Path) -> None:
    found = Page(page_of([run]))
    said = {
        "command": "fit",
        "validation accuracy": "62.00% of 100 (52.2% to 70.9%)",  # Wilson's interval of 62 in 100
        "best validation": "62.50%, the best of 2",
        "training loss": "1.2500",
        "training": "2 epochs, 20 steps",
        "images per second": "550, the median of 2",
        "mode": "ddp, 2 processes, 32-true",
    }
    assert {name: found.after(name) for name in said} == said
    charts = {"digest1", "epoch", "Accuracy by class, validation", "70.0%", "Accuracy by rank, validation"}
    assert charts <= {*found.text}
    assert not {"test accuracy", "Settings that differ"} & {*found.text}


def test_classes_are_listed_with_what_they_are_taken_for(run: Path) -> None:
    found = Page(page_of([run]))
    assert found.after("Validation") == "Balanced accuracy, the mean over the classes: 62.00%."
    row = found.text.index("most often taken for") + 1
    assert found.text[row : row + 8] == ["cat", "50", "70.0%", "dog, 15", "dog", "50", "54.0%", "cat, 23"]
    # Balanced accuracy is over the classes that have images; a class that is always right is taken for no other.
    write_confusion(run, "test", CLASSES, [[7, 0], [0, 0]])
    text = Page(page_of([run])).text
    assert "Balanced accuracy, the mean over the classes: 100.00%." in text
    row = text.index("most often taken for", text.index("Test")) + 1
    assert text[row : row + 8] == ["cat", "7", "100.0%", "\u2013", "dog", "0", "\u2013", "\u2013"]


@pytest.mark.parametrize(("num_classes", "num_listed"), [(20, 20), (21, 10)])
def test_of_many_classes_the_worst_are_listed(num_classes: int, num_listed: int, tmp_path: Path) -> None:
    """Class n has n right ones of 30; the others are taken for class 0, those of class 0 for the second."""
    counts = [[30 - right, *[0] * (num_classes - 1)] for right in range(num_classes)]
    for right, row in enumerate(counts):
        row[right] = right
    counts[0][1] = 30
    run = write_run(tmp_path / "run", classes=[f"c{number}" for number in range(num_classes)], matrix=counts)
    text = Page(page_of([run])).text
    start = text.index("most often taken for") + 1
    rows = [text[place : place + 4] for place in range(start, start + 4 * num_listed, 4)]
    others = ["c1, 30", *(f"c0, {30 - right}" for right in range(1, num_listed))]
    assert rows == [[f"c{n}", "30", f"{n / 30:.1%}", others[n]] for n in range(num_listed)]
    assert text[start + 4 * num_listed] == "Ranks"
    said = "The 10 classes with the lowest accuracy; 11 are left out."
    assert any(said in words for words in text) == (num_classes == 21)


def test_curves_are_over_epochs_or_steps_without_digests(run: Path) -> None:
    loss, accuracy = page._curves({"": read_run(run)})
    lines = {line.get_label(): line.get_xydata().tolist() for line in loss.axes[0].lines}
    assert lines == {"val/loss": [[1, 1.75], [2, 1.5]], "train/loss": [[1, 2.25], [2, 1.25]]}
    assert [line.get_linestyle() for line in loss.axes[0].lines] == ["-", "--"]
    assert accuracy.axes[0].lines[0].get_xydata().tolist() == [[1, 0.5], [2, 0.625]]
    (run / "sample_audit.csv").unlink()
    assert "Samples" not in Page(page_of([run])).text
    assert page._curves({"": read_run(run)})[0].axes[0].lines[0].get_xydata().tolist() == [[10, 1.75], [20, 1.5]]


def ends_of_epochs(run: Path) -> list[float]:
    return [x for x, _ in page._curves({"": read_run(run)})[0].axes[0].lines[0].get_xydata()]  # type: ignore[misc]


def test_epochs_may_have_unlike_numbers_of_steps(run: Path) -> None:
    """As after a resume with another batch size. The last may have ended within, the first be in another folder."""
    (run / "metrics.csv").write_text(METRICS.replace("19", "14"))
    (run / "sample_audit.csv").unlink()
    for number, steps in enumerate((10, 5)):
        write_epoch(run, number, steps, 1280, "d")
    assert ends_of_epochs(run) == [1, 2]
    (run / "sample_audit.csv").unlink()
    for number, samples in enumerate((1280, 640)):
        write_epoch(run, number, 10 - 5 * number, samples, "d")
    assert ends_of_epochs(run) == [1, 1.5]
    (run / "sample_audit.csv").unlink()
    write_epoch(run, 2, 5, 1280, "d")
    assert Page(page_of([run])).after("training") == "3 epochs, 15 steps"
    assert ends_of_epochs(run)[-1] == 3


def test_an_evaluation_has_no_curve(run: Path) -> None:
    other = write_run(run.parent / "second", command="lit-cifar validate --ckpt_path=a.ckpt")
    (other / "metrics.csv").write_text("epoch,step,val/acc,val/loss\n0,0,0.5,1.75\n")
    (other / "sample_audit.csv").unlink()
    text = Page(page_of([run, other])).text
    assert any(words.endswith("first, val/loss") for words in text)
    assert not any(words.endswith("second, val/loss") for words in text)
    assert str(other)[-40:] in text  # below the title of its confusion matrix


def test_fits_that_began_with_other_weights_differ(run: Path) -> None:
    other = write_run(run.parent / "second", command="lit-cifar fit --ckpt_path=w.pt")
    assert different_settings([read_run(run), read_run(other)]) == {"ckpt_path": [None, "w.pt"]}


def test_of_the_gpus_of_a_machine_those_of_the_run_are_counted(run: Path) -> None:
    other = write_run(run.parent / "second", device="cuda", gpus=["H100"] * 8, num_devices=1)
    assert Page(page_of([other])).after("hardware") == "1 x H100"


def test_runs_are_told_apart(run: Path) -> None:
    config = json.loads(json.dumps(CONFIG).replace("0.1", "0.5"))
    other = write_run(run.parent / "second", config=config)
    write_per_rank(other, "val", [AccuracyCount(62, 100)])
    found = Page(page_of([run, other]))
    assert "2 runs" in found.text[0]
    assert found.after("--model.optimizer.lr") == "0.1"
    assert "--trainer.devices" not in found.text  # it does not differ
    assert any("All runs used the same samples." in text for text in found.text)
    loss, _ = page._curves({"a": read_run(run), "b": read_run(other)})
    assert len({line.get_color() for line in loss.axes[0].lines}) == 2
    assert found.text.count("rank 1") == 1  # of the run that has one


def test_a_rank_beyond_chance_is_marked(run: Path) -> None:
    write_per_rank(run, "test", [AccuracyCount(900, 1000), AccuracyCount(895, 1000), AccuracyCount(800, 1000)])
    text = Page(page_of([run])).text
    assert {"80.0% !", "90.0%", "! differs from the other ranks by more than chance explains"} <= {*text}


def test_a_run_without_a_log_point_or_evaluation_has_no_charts(run: Path) -> None:
    (run / "metrics.csv").write_text(METRICS + "2,,29,,0.9")  # a line that is being written is left out
    assert read_run(run).metrics["train/loss"] == [(9, 2.25), (19, 1.25)]
    (run / "metrics.csv").write_text("epoch,step,train/loss\n")
    for name in ("per_rank.csv", "confusion.csv", "sample_audit.csv"):
        (run / name).unlink()
    found = Page(page_of([run]))
    assert "img" not in {name for name, _ in found.elements}
    assert "Repeat" in found.text


# ---------------------------------------------------------------- one file that stands alone


HOSTILE = '<script>alert(\'1\')</script>&"x" onload="y'


def test_no_text_of_a_run_becomes_html(tmp_path: Path) -> None:
    """Class names, folder names, settings and commands are the user's, and the page is sent to others."""
    strange = {"command": HOSTILE, "data": HOSTILE, "strategy": HOSTILE}
    folder = write_run(tmp_path / HOSTILE.replace("/", "|"), classes=(HOSTILE, "dog"), **strange)
    config = CONFIG | {"data": {"batch_size": HOSTILE}}
    other = write_run(tmp_path / "other", classes=(HOSTILE, "dog"), config=config, data=HOSTILE)
    found = Page(page_of([folder, other]))
    assert "script" not in {name for name, _ in found.elements}
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert found.text.count(HOSTILE) >= 3


def test_the_page_loads_nothing(run: Path) -> None:
    """`Page` has found that each image is in the page."""
    html = page_of([run, write_run(run.parent / "second")])
    elements = Page(html).elements
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {name for name, _ in elements}
    assert not {"href", "srcset"} & {key for _, attributes in elements for key in attributes}
    assert not re.search(r"https?:|@import|url\(", html)
    policies = [it["content"] for _, it in elements if it.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


@pytest.mark.parametrize("name", [HOSTILE, "$\\frac{1}$", "\u732b", "a\x01b\nc", "\udce9"])
def test_any_name_of_a_class_can_be_drawn(name: str) -> None:
    drawn = image_of(confusion_figure(torch.tensor([[1, 2], [3, 4]]), (name, "dog"), title="$\\frac{"))
    assert {"dog", "predicted class", shortened(name)} <= {*Page(drawn).text}


def test_settings_that_only_some_commands_have_do_not_differ(run: Path) -> None:
    config = {key: CONFIG[key] for key in ("trainer", "data")} | {"ckpt_path": "best.ckpt"}
    config["trainer"] = {"strategy": "PipelineStrategy", "devices": 2, "callbacks": ["a"]}
    other = write_run(run.parent / "second", config=config)
    assert different_settings([read_run(run), read_run(other)]) == {
        "trainer.strategy": ["ddp", "PipelineStrategy"],
        "trainer.callbacks": [None, '["a"]'],
    }


def test_arguments_that_a_function_takes_by_kwargs_are_settings(tmp_path: Path) -> None:
    runs = []
    for rate in (0.1, 0.5):
        network = {"class_path": "timm.create_model", "dict_kwargs": {"drop_rate": rate}}
        runs.append(read_run(write_run(tmp_path / str(rate), config={**CONFIG, "model": {"network": network}})))
    assert different_settings(runs) == {"model.network.dict_kwargs.drop_rate": ["0.1", "0.5"]}


@pytest.mark.parametrize(
    ("command", "devices", "expected"),
    [
        ("python -m lit_cifar fit --run_dir=a", 2, "python -m lit_cifar fit --config {}"),
        ("lit-cifar fit", "auto", "python -m lit_cifar fit --config {} --trainer.devices=2"),
        ("lit-cifar fit --ckpt_path 'my w.pt' --x=1", 2, "python -m lit_cifar fit --config {} --ckpt_path 'my w.pt'"),
        ("lit-cifar fit --ckpt_path=w.pt", 2, "python -m lit_cifar fit --config {} --ckpt_path w.pt"),
        ("lit-cifar test --ckpt_path=w.pt", 2, "python -m lit_cifar test --config {}"),  # it is in config.yaml
        ("train.py --epochs 3", 2, None),
    ],
)
def test_the_command_that_repeats_a_run(command: str, devices: object, expected: str | None, tmp_path: Path) -> None:
    config = CONFIG | {"trainer": {"strategy": "ddp", "devices": devices}}
    folder = write_run(tmp_path / "my run", command=command, git=None, config=config)
    found = repeat_command(read_run(folder))
    assert found == (None if expected is None else expected.format(shlex.quote(f"{folder}/config.yaml")))


# ---------------------------------------------------------------- what is refused


SPOILT = {
    "no metrics": ("metrics.csv", None, "", ["has no metrics.csv", "`predict`"]),
    "no data": ("environment.json", '"data"', '"date"', ["environment.json is damaged: it does not say started"]),
    "a command": ("environment.json", "2584fce", "HEAD; echo", ['git.commit is "HEAD; echo', "not that of a commit"]),
    "a list": ("environment.json", '"ddp"', '["ddp"]', ['strategy is ["ddp"]']),
    "a word": ("metrics.csv", "2.25", "abc", ["metrics.csv is damaged: line 5", "'abc'"]),
    "a step": ("metrics.csv", ",,19,,1.25", ",,x,,1.25", ["line 7: 'x' is not a whole number"]),
    "cells": ("metrics.csv", "0,,4,500.0", "0,,4,7,500.0", ["line 3: 8 cells, and the first line has 7"]),
    "too many": ("per_rank.csv", "30,50", "60,50", ["per_rank.csv is damaged: line 2: not a count: 60"]),
    "a class less": ("confusion.csv", "val,dog,23,27\n", "", ["a line for each class"]),
    "less than none": ("confusion.csv", "15", "-1", ["line 2: '-1' is not a whole number"]),
    "digests": ("sample_audit.csv", "steps", "stops", ["sample_audit.csv is damaged", "name the columns epoch, steps"]),
}


@pytest.mark.parametrize(("name", "old", "new", "words"), SPOILT.values(), ids=SPOILT.keys())
def test_a_damaged_folder_is_refused(name: str, old: str | None, new: str, words: list[str], run: Path) -> None:
    if old is None:
        (run / name).unlink()
    else:
        (run / name).write_text((run / name).read_text().replace(old, new))
    with pytest.raises(ConfigError) as error:
        read_run(run)
    assert [word for word in [str(run), *words] if word not in error.value.problem] == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["first/metrics.csv"], ["metrics.csv is a file, not the folder of a run", "fit"]),
        (["first", "birds"], ["different data", "first has cats and dogs", "birds has birds"]),
        (["first", "pictures"], ["different classes", "has cat, dog", "has cat, bird"]),
        (["first", "--output=first"], ["--output=first cannot be written", "another file"]),
    ],
)
def test_wrong_runs_are_refused(args: list[str], words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run.parent / "birds", data="birds")
    write_run(run.parent / "pictures", classes=("cat", "bird"))
    monkeypatch.chdir(run.parent)
    refused("report", *args, says=words)
    assert not Path("report.html").exists()


# ---------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was interrupted and resumed, and a test."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: folder / name for name in ("fit", "again", "test")}
    flags = ["fit", *TINY, f"--run_dir={runs['fit']}", "--trainer.max_epochs=2"]
    with pytest.raises(RuntimeError, match="fails at step 5"):  # the first of the second epoch
        run_as_typed(*flags, *callback("recorder.FailOn", rank=0, step=5))
    run_as_typed(*flags, "--resume=auto")
    checkpoint = f"--ckpt_path={runs['fit'] / 'checkpoints' / 'best.ckpt'}"
    run_as_typed("test", *TINY, checkpoint, f"--run_dir={runs['test']}")
    return runs


def run_as_typed(*args: str) -> Result:
    """In this process, which takes the command for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lit-cifar", *args])
        return run_here(*args)


def test_a_resumed_run_and_its_test_make_a_page(real: dict[str, Path], tmp_path: Path) -> None:
    for name, split in (("fit", "val"), ("test", "test")):
        found = read_run(real[name])
        confusion = found.confusion[split].counts
        right = sum(row[index] for index, row in enumerate(confusion))
        assert (right, sum(map(sum, confusion))) == counts(real[name], split)["all"]
        assert found.metrics[f"{split}/acc"][-1][1] == pytest.approx(right / sum(map(sum, confusion)))
    target = tmp_path / "page.html"
    result = run_here("report", real["fit"], real["test"], f"--output={target}")
    assert result.stderr == ""
    assert result.stdout.startswith(f"wrote {target}, ")
    shown = Page(target.read_text())
    assert shown.after("training") == "2 epochs, 10 steps"
    assert {"Accuracy by class, test", "--ckpt_path"} <= {*shown.text}


def test_the_command_of_the_page_repeats_the_run(real: dict[str, Path]) -> None:
    command = repeat_command(read_run(real["fit"]))
    assert command is not None
    words = shlex.split(command.splitlines()[-1])
    assert words[:3] == ["python", "-m", "lit_cifar"]
    run_here(*words[3:], f"--run_dir={real['again']}")
    first, again = (read_run(real[name]) for name in ("fit", "again"))
    assert (again.epochs, again.settings, again.confusion) == (first.epochs, first.settings, first.confusion)
    assert again.metrics["train/loss_step"] == first.metrics["train/loss_step"]


def test_a_class_may_have_the_name_of_a_column(run: Path) -> None:
    names, counts = ("broken", "split", "class"), ((5, 2, 1), (0, 3, 0), (1, 0, 4))
    write_confusion(run, "test", names, counts)
    found = read_run(run).confusion["test"]
    assert (found.classes, found.counts) == (names, counts)


def test_a_class_that_is_new_drops_the_rows_of_other_classes(tmp_path: Path) -> None:
    for split, hits in (("val", 1), ("test", 2), ("val", 3)):
        write_confusion(tmp_path, split, CLASSES, [[hits, 0], [0, hits]])
    rows = ["split,class,cat,dog", "test,cat,2,0", "test,dog,0,2", "val,cat,3,0", "val,dog,0,3"]
    assert (tmp_path / "confusion.csv").read_text().splitlines() == rows
    write_confusion(tmp_path, "test", ("cow",), [[5]])
    assert (tmp_path / "confusion.csv").read_text().splitlines() == ["split,class,cow", "test,cow,5"]
