"""What the loggers leave: charts, graph and settings for TensorBoard, and one row for each step in `metrics.csv`."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, run_here
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.summary.writer import event_file_writer
from tiny_task import TinyData, TinyTask, fake_trainer, read_events, tiny_trainer
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from lit_cifar.models.resnet import build_resnet
from lit_cifar.reporting import figures
from lit_cifar.reporting.evaluation_tables import PerRankAccuracy
from lit_cifar.reporting.figures import EvaluationFigures
from lit_cifar.reporting.loggers import RunSettings, main_settings, run_loggers

# ---------------------------------------------------------------- TensorBoard


def graph_nodes(events: EventAccumulator) -> list[str]:
    return [node.op for node in events.Graph().node]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_graph_shows_the_network_and_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    network = build_resnet("resnet10", stem="imagenet", num_classes=10).to(dtype).train()
    module = nn.Module()
    module.network, module.image_shape = network, (3, 32, 32)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    convolutions = sum(isinstance(child, nn.Conv2d) for child in network.modules())
    random_state = torch.get_rng_state()
    writer = SummaryWriter(str(tmp_path))
    monkeypatch.setattr(figures, "tensorboard_writer", lambda trainer: writer)

    trainer, graph = fake_trainer(), EvaluationFigures()
    graph.setup(trainer, module, "fit")
    network.layer1 = nn.Identity()  # as a strategy changes the network between the two
    graph.on_train_end(trainer, module)
    writer.close()

    operations = graph_nodes(read_events(tmp_path))
    assert operations.count("aten::_convolution") == convolutions
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(child.training for child in network.modules())
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_no_graph_is_drawn_where_no_figures_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SummaryWriter(str(tmp_path))
    monkeypatch.setattr(figures, "tensorboard_writer", lambda trainer: writer)
    trainer, graph = fake_trainer(), EvaluationFigures(every_n_epochs=0)
    graph.setup(trainer, nn.Module(), "fit")
    graph.on_train_end(trainer, nn.Module())
    writer.close()
    assert "graph" not in read_events(tmp_path).Tags() or not read_events(tmp_path).Tags()["graph"]


def fit(folder: Path, *, first_step: int | None = None) -> EventAccumulator:
    """What a fit of two epochs leaves for TensorBoard."""
    loggers = run_loggers(folder, first_step=first_step)
    callbacks = [EvaluationFigures(), RunSettings()]
    trainer = tiny_trainer(folder, logger=loggers, callbacks=callbacks, max_epochs=2)
    trainer.fit(TinyTask(), datamodule=TinyData())
    return read_events(folder)


def layout_of(events: EventAccumulator) -> dict[str, list[str]]:
    """The tags of each chart of the one layout there is."""
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    return {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}


def test_fit_writes_graph_and_settings_beside_the_last_metrics(tmp_path: Path) -> None:
    events = fit(tmp_path)
    assert graph_nodes(events)
    summary = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for setting in (b"tiny", b"batch_size", b"SGD", b"momentum", b"single_device", b"replicas"):
        assert setting in summary
    named = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    assert b"val/acc" in named
    assert b"hp_metric" not in named
    # The tab shows the last value of a chart of this name; a number that is written once is a chart of one point.
    scalars = events.Tags()["scalars"]
    assert {tag for tag in scalars if len(events.Scalars(tag)) < 2} == set()
    assert {"val/acc", "train/loss"} <= {*scalars}


def test_train_and_validation_share_a_chart(tmp_path: Path) -> None:
    charts = layout_of(fit(tmp_path))
    known = ["train/loss", "train/loss_step", "train/acc", "train/acc_step", "val/loss", "val/acc", "val/acc_top5"]
    shown = {name: [tag for tag in known if any(re.match(t, tag) for t in tags)] for name, tags in charts.items()}
    assert shown == {"loss": ["train/loss", "val/loss"], "accuracy": ["train/acc", "val/acc"]}


def test_a_resumed_run_has_one_layout(tmp_path: Path) -> None:
    fit(tmp_path)
    assert layout_of(fit(tmp_path, first_step=3)).keys() == {"loss", "accuracy"}


def test_the_numbers_of_one_evaluation_are_a_table(tmp_path: Path) -> None:
    loggers = run_loggers(tmp_path, charts=False)
    trainer = tiny_trainer(tmp_path, logger=loggers, callbacks=[EvaluationFigures(), PerRankAccuracy()])
    trainer.validate(TinyTask(), datamodule=TinyData(), verbose=False)
    events = read_events(tmp_path)
    assert events.Tags()["scalars"] == []
    (text,) = events.Tensors("results/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    accuracy = float(trainer.callback_metrics["val/acc"])
    assert f"| val/acc | {accuracy:.6g} |" in lines
    assert {"val/acc_rank0", "val/acc_class/disc_plain"} <= {line.split(" | ")[0].removeprefix("| ") for line in lines}
    (row,) = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    assert float(row["val/acc"]) == accuracy


@pytest.mark.parametrize("first_step", [0, 2])
def test_what_a_run_writes_again_is_hidden(tmp_path: Path, first_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start on too, where it died before its first checkpoint."""
    # TensorBoard reads files by name. Those of one process and second end with a number, and "10" comes before "9".
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    for step, logged in ((None, 1.0), (first_step, 2.0)):
        tensorboard_logger, _ = run_loggers(tmp_path, first_step=step)
        for at in range(step or 0, 4 if step is None else 3):
            tensorboard_logger.log_metrics({"loss": logged}, at)
        tensorboard_logger.finalize("success")
    values = [(event.step, event.value) for event in read_events(tmp_path).Scalars("loss")]
    assert values == [(at, 1.0) for at in range(first_step)] + [(at, 2.0) for at in range(first_step, 3)]


def test_settings_are_flat(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, logger=False)
    trainer.fit(TinyTask(), datamodule=TinyData())
    assert main_settings(trainer, trainer.lightning_module) == {
        "data": "tiny",
        "batch_size": 8,
        "arch": "TinyTask",
        "stem": "",
        "max_epochs": 1,
        "strategy": "single_device",
        "replicas": 1,
        "precision": "32-true",
        "optimizer": "SGD",
        "lr": 1e-4,
        "momentum": 0.9,
        "weight_decay": 0,
        "nesterov": False,
    }


# ---------------------------------------------------------------- `metrics.csv`


def write(folder: Path, *calls: dict[str, Any], kept_rows: int = 0) -> None:
    """Log as Lightning does, which saves after each call but those of its learning rate monitor."""
    _, logger = run_loggers(folder, kept_rows=kept_rows)
    for call in calls:
        logger.log_metrics({name: value for name, value in call.items() if name != "step"}, step=call["step"])
        if "epoch" in call:
            logger.save()
    logger.finalize("success")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]


STEP = {"epoch": 0, "train/loss_step": 1.5, "step": 3}
VALIDATION = {"epoch": 0, "val/acc": 0.5, "step": 3}
NEXT = {"epoch": 1, "train/loss_step": 1.25, "step": 4}


def test_what_is_logged_of_a_step_is_one_row(tmp_path: Path) -> None:
    write(tmp_path, {"lr-SGD": 0.1, "step": 3}, STEP, VALIDATION, {"lr-SGD": 0.05, "step": 4}, NEXT)
    assert rows(tmp_path) == [
        {"epoch": "0", "lr-SGD": "0.1", "step": "3", "train/loss_step": "1.5", "val/acc": "0.5"},
        {"epoch": "1", "lr-SGD": "0.05", "step": "4", "train/loss_step": "1.25"},
    ]


def test_a_learning_rate_alone_is_no_row(tmp_path: Path) -> None:
    """Of a run that ends in the middle of a step, before its loss is known."""
    write(tmp_path, {"lr-SGD": 0.1, "step": 2}, STEP, {"lr-SGD": 0.05, "step": 4})
    assert rows(tmp_path) == [{"epoch": "0", "step": "3", "train/loss_step": "1.5"}]


def test_other_numbers_that_are_logged_without_an_epoch_are_kept(tmp_path: Path) -> None:
    write(tmp_path, {"mine": 7, "step": 2}, STEP)
    assert rows(tmp_path) == [{"mine": "7", "step": "2"}, {"epoch": "0", "step": "3", "train/loss_step": "1.5"}]


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_a_resumed_run_fills_the_row_of_its_checkpoint(tmp_path: Path, killed_after: int) -> None:
    """The checkpoint was written after one row, before the validation of its step."""
    calls = [STEP, VALIDATION, NEXT]
    write(tmp_path / "whole", *calls)
    write(tmp_path / "run", *calls[:killed_after])
    write(tmp_path / "run", VALIDATION, NEXT, kept_rows=1)
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_every_row_of_a_run_has_its_step_its_epoch_and_more(tmp_path: Path) -> None:
    """With a schedule by epochs too, which Lightning's monitor would log at the beginning of each."""
    run = tmp_path / "run"
    flags = ["--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=1", "--trainer.max_epochs=2"]
    assert run_here("fit", *TINY, *flags, "--trainer.log_every_n_steps=2", f"--run_dir={run}").status == 0
    found = rows(run)
    assert [int(row["step"]) for row in found] == [
        1,
        3,
        4,
        5,
        7,
        9,
    ]  # of five steps an epoch, every second and the last
    assert [int(row["epoch"]) for row in found] == [0, 0, 0, 1, 1, 1]
    assert {"train/loss_step", "lr-NesterovSGD"} <= found[0].keys()
    assert {"train/loss", "val/acc", "train/loss_step", "lr-NesterovSGD"} <= found[-1].keys()
    assert {"train/loss", "val/acc"} <= found[2].keys()
