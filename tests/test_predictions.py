"""The CSV of `predict`: every file, in input order, whatever process classified it."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_task import CLASSES, Batches, TinyData, TinyTask, fake_trainer, tiny_trainer

from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.data.pictures import FolderImages
from lit_cifar.reporting.evaluation_tables import PredictionWriter

NAMES = ("b.png", 'odd, "name".png', "broken.png", "sub/a.jpg", "notes.txt", "z.png")
ERRORS = (None, None, "truncated, at byte 7", None, "not an image", None)


def folder_data() -> TinyData:
    data = TinyData(num_images=4, batch_size=2)
    data.folder = FolderImages(tuple(map(Path, NAMES)), ERRORS, data.sets["predict"])
    return data


def predict(folder: Path, **settings: Any) -> list[list[str]]:
    trainer = tiny_trainer(folder, callbacks=[PredictionWriter()], **settings)
    trainer.predict(TinyTask(), datamodule=folder_data(), return_predictions=False)
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.reader(file))


def expected_rows() -> list[list[str]]:
    data = folder_data()
    results = iter(TinyTask()(data.sets["predict"].images.float()).detach().softmax(dim=1))
    rows = []
    for name, error in zip(NAMES, ERRORS, strict=True):
        if error is None:
            confidence, label = next(results).max(dim=0)
            rows.append([name, CLASSES[label], f"{float(confidence):.6f}", ""])
        else:
            rows.append([name, "", "", error])
    return rows


def test_every_file_has_a_row_in_input_order(tmp_path: Path) -> None:
    header, *rows = predict(tmp_path)
    assert header == ["file", "class", "confidence", "error"]
    assert rows == expected_rows()
    assert [path.name for path in tmp_path.glob("*.part")] == []
    _, *rows = predict(tmp_path, limit_predict_batches=1)
    assert rows[:3] == expected_rows()[:3]
    unreached = "not classified: the run was limited to fewer batches"
    assert [row[3] for row in rows[3:]] == [unreached, "not an image", unreached]


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 0, 1, 1, 2, 2]], ids=["each once", "each on two processes"])
def test_tables_of_several_processes_add_up(tmp_path: Path, ranks: list[int]) -> None:
    data, task = folder_data(), TinyTask()
    tables = []

    def process(rank: int, reduce: Any) -> PredictionWriter:
        trainer = fake_trainer(datamodule=data, is_global_zero=True, log_dir=str(tmp_path), loggers=["some"])
        trainer.strategy.reduce = reduce
        writer = PredictionWriter()
        writer.on_predict_epoch_start(trainer, task)
        for index, batch in enumerate(Batches(data.sets["predict"], 3, BatchSplit(dp_size=3, dp_rank=rank))):
            writer.on_predict_batch_end(trainer, task, task.predict_step(_float(batch), index), batch, index)
        writer.on_predict_epoch_end(trainer, task)
        return writer

    for rank in ranks[:-1]:
        process(rank, lambda table, reduce_op: tables.append(table) or table)
    last = process(ranks[-1], lambda table, reduce_op: torch.stack([*tables, table]).sum(dim=0))
    assert [list(row) for row in last.rows] == expected_rows()


def test_only_rank_0_writes_and_nothing_without_a_run_folder(tmp_path: Path) -> None:
    data = folder_data()
    for is_global_zero, loggers in ((False, ["some"]), (True, [])):
        strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda table, reduce_op: table)
        trainer = SimpleNamespace(
            strategy=strategy, datamodule=data, is_global_zero=is_global_zero, log_dir=str(tmp_path), loggers=loggers
        )
        writer = PredictionWriter()
        writer.on_predict_epoch_start(trainer, TinyTask())
        writer.on_predict_epoch_end(trainer, TinyTask())
    assert list(tmp_path.iterdir()) == []
    assert len(writer.rows) == len(NAMES)


def _float(batch: Any) -> Any:
    return batch._replace(images=batch.images.float())
