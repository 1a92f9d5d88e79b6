"""The callback on one process, on a process with three replicas, and on two real processes."""

import csv
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny_task import read_events, tiny_trainer
from torch import Tensor

from lit_cifar.data.images import Batch
from lit_cifar.reporting.evaluation_tables import PerRankAccuracy, write_per_rank
from lit_cifar.reporting.rank_statistics import AccuracyCount

NUM_CLASSES = 3


def batch_of(correct: int, total: int) -> Batch:
    """A batch whose "images" are the logits that `Echo` returns; the first `correct` of them are right."""
    labels = torch.arange(total) % NUM_CLASSES
    answers = torch.where(torch.arange(total) < correct, labels, (labels + 1) % NUM_CLASSES)
    return Batch(torch.eye(NUM_CLASSES)[answers], labels, torch.arange(total), 1.0)


class Echo(LightningModule):
    """Returns the logits it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return (self.scale * batch.images).sum()

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return batch.images

    validation_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Batches(LightningDataModule):
    """The same batches in every loader. (Lightning takes a plain list of tuples for a collection of loaders.)"""

    name = "three classes"

    def __init__(self, *batches: Batch) -> None:
        super().__init__()
        self.loader = torch.utils.data.DataLoader(batches, batch_size=None)

    def train_dataloader(self) -> Any:
        return self.loader

    val_dataloader = test_dataloader = train_dataloader


def trainer_for(run: Path, **options: Any) -> Trainer:
    return tiny_trainer(run, **{"callbacks": [PerRankAccuracy()], "max_epochs": None} | options)


def counts(trainer: Trainer, split: str) -> list[AccuracyCount]:
    (callback,) = (callback for callback in trainer.callbacks if isinstance(callback, PerRankAccuracy))
    return callback.counts[split]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = read_events(run)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_one_process_counts_every_batch_and_reports_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_for(tmp_path)
    trainer.test(Echo(), datamodule=Batches(batch_of(3, 4), batch_of(0, 0), batch_of(2, 5)))

    assert counts(trainer, "test") == [AccuracyCount(5, 9)]
    assert (tmp_path / "per_rank.csv").read_text() == (
        "split,rank,correct,total,accuracy\ntest,0,5,9,0.555556\ntest,all,5,9,0.555556\n"
    )
    assert scalars(tmp_path)["test/acc_rank0"] == [(0, pytest.approx(5 / 9))]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip() == "Accuracy per rank, test, three classes" for line in lines)
    # Wilson's interval of 5 in 9, as in Wilson's formula by hand
    (row,) = [line for line in lines if line.startswith("│ all")]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["all", "5", "9", "55.56%", "26.67% to 81.12%", ""]


def test_fit_counts_each_validation_afresh_without_the_sanity_check_or_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sanity(PerRankAccuracy):
        seen_after_sanity_check: dict[str, list[AccuracyCount]] | None = None

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen_after_sanity_check = dict(self.counts)

    callback = Sanity()
    trainer = trainer_for(tmp_path, max_epochs=2, num_sanity_val_steps=1, callbacks=[callback])
    trainer.fit(Echo(), datamodule=Batches(batch_of(3, 4), batch_of(2, 5)))

    assert callback.seen_after_sanity_check == {}
    assert counts(trainer, "val") == [AccuracyCount(5, 9)]
    assert scalars(tmp_path)["val/acc_rank0"] == [(2, pytest.approx(5 / 9)), (4, pytest.approx(5 / 9))]
    assert (tmp_path / "per_rank.csv").read_text().count("val,all,5,9,") == 1
    assert "Accuracy per rank" not in capsys.readouterr().out
    trainer.validate(Echo(), datamodule=Batches(batch_of(1, 2)))
    assert "Accuracy per rank, val, three classes" in capsys.readouterr().out
    assert "val,all,1,2,0.500000\n" in (tmp_path / "per_rank.csv").read_text()


@pytest.mark.parametrize("options", [{"logger": False}, {"fast_dev_run": True}], ids=str)
def test_a_run_without_a_folder_still_prints_its_table(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_for(tmp_path, default_root_dir=tmp_path, **options).test(Echo(), datamodule=Batches(batch_of(1, 2)))
    assert "Accuracy per rank, test, three classes" in capsys.readouterr().out
    assert list(tmp_path.rglob("per_rank.csv*")) == []


class Replicas(SingleDeviceStrategy):
    """One process that pretends to compute each batch in chunks on three devices, as `dp` does."""

    replicas_per_rank = 3

    def replica_of(self, num_samples: int) -> Tensor:
        sizes = [len(chunk) for chunk in torch.arange(num_samples).chunk(3)]
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def test_a_rank_is_a_replica_where_one_process_holds_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_for(tmp_path, strategy=Replicas(torch.device("cpu")))
    trainer.test(Echo(), datamodule=Batches(batch_of(400, 600), batch_of(1, 2), batch_of(0, 0)))
    # chunks of 200, 200, 200 and of 1, 1, none
    assert counts(trainer, "test") == [AccuracyCount(201, 201), AccuracyCount(200, 201), AccuracyCount(0, 200)]
    flags = {line.split("│")[1].strip(): line.split("│")[-2].strip() for line in _rows(capsys.readouterr().out)}
    assert flags == {"0": "", "1": "", "2": "yes", "all": ""}


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("│")]


def test_replicas_of_the_second_process_fill_its_own_rows(tmp_path: Path) -> None:
    class SecondProcess(Replicas):
        distributed_sampler_kwargs = {"num_replicas": 2, "rank": 1}  # noqa: RUF012

    trainer = trainer_for(tmp_path, strategy=SecondProcess(torch.device("cpu")))
    trainer.test(Echo(), datamodule=Batches(batch_of(4, 6)))
    seen = [(count.correct, count.total) for count in counts(trainer, "test")]
    assert seen == [(0, 0), (0, 0), (0, 0), (2, 2), (2, 2), (0, 2)]


def test_a_split_replaces_its_own_rows_only_and_a_write_that_fails_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_per_rank(tmp_path, "val", [AccuracyCount(1, 2), AccuracyCount(2, 2)])
    write_per_rank(tmp_path, "test", [AccuracyCount(3, 4)])
    write_per_rank(tmp_path, "val", [AccuracyCount(0, 0)])
    monkeypatch.setattr(csv, "writer", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_per_rank(tmp_path, "val", [AccuracyCount(2, 2)])
    assert (tmp_path / "per_rank.csv").read_text().splitlines() == [
        "split,rank,correct,total,accuracy",
        "test,0,3,4,0.750000",
        "test,all,3,4,0.750000",
        "val,0,0,0,nan",
        "val,all,0,0,nan",
    ]
