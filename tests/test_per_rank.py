"""The callback on one process, on a process with three replicas, and on two real processes."""

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return batch.images

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return batch.images

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Loader:
    """Yields the given batches. (Lightning takes a plain list of tuples for a collection of loaders.)"""

    def __init__(self, *batches: Batch) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Batches(LightningDataModule):
    """The same batches in every loader."""

    name = "three classes"

    def __init__(self, *batches: Batch) -> None:
        super().__init__()
        self.loader = Loader(*batches)

    def train_dataloader(self) -> Loader:
        return self.loader

    val_dataloader = test_dataloader = train_dataloader


def trainer_for(run: Path, **options: Any) -> Trainer:
    loggers = [CSVLogger(run, name="", version=""), TensorBoardLogger(run, name="", version="")]
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": loggers,
        "callbacks": [PerRankAccuracy()],
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return Trainer(**(defaults | options))


def counts(trainer: Trainer, split: str) -> list[AccuracyCount]:
    (callback,) = (callback for callback in trainer.callbacks if isinstance(callback, PerRankAccuracy))
    return callback.counts[split]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run)).Reload()
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
    metrics = tmp_path / "metrics.csv"
    assert not metrics.exists() or "acc_rank" not in metrics.read_text()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip() == "Accuracy per rank, test, three classes" for line in lines)
    # Wilson's interval of 5 in 9, as in Wilson's formula by hand
    (row,) = [line for line in lines if line.startswith("│ all")]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["all", "5", "9", "55.56%", "26.67% to 81.12%", ""]


def test_an_evaluation_without_samples_is_reported_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_for(tmp_path).test(Echo(), datamodule=Batches(batch_of(0, 0)))
    assert (tmp_path / "per_rank.csv").read_text().endswith("test,0,0,0,nan\ntest,all,0,0,nan\n")
    assert "0.00% to 100.00%" in capsys.readouterr().out
    assert "test/acc_rank0" not in scalars(tmp_path)


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


def test_a_split_replaces_its_own_rows_only(tmp_path: Path) -> None:
    write_per_rank(tmp_path, "val", [AccuracyCount(1, 2), AccuracyCount(2, 2)])
    write_per_rank(tmp_path, "test", [AccuracyCount(3, 4)])
    write_per_rank(tmp_path, "val", [AccuracyCount(0, 2)])
    assert (tmp_path / "per_rank.csv").read_text().splitlines() == [
        "split,rank,correct,total,accuracy",
        "test,0,3,4,0.750000",
        "test,all,3,4,0.750000",
        "val,0,0,2,0.000000",
        "val,all,0,2,0.000000",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["per_rank.csv"]


def test_a_write_that_fails_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_per_rank(tmp_path, "val", [AccuracyCount(1, 2)])
    before = (tmp_path / "per_rank.csv").read_text()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(csv, "writer", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_per_rank(tmp_path, "val", [AccuracyCount(2, 2)])
    assert (tmp_path / "per_rank.csv").read_text() == before


class Huge(PerRankAccuracy):
    """Starts at a count that neither float32 nor float64 can hold."""

    start = 2**53 + 1

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_test_epoch_start(trainer, pl_module)
        self._tally[trainer.global_rank] += self.start


class UnevenBatches(Batches):
    """Rank 0 has 6 of 8 right, rank 1 has 1 of 4 and an empty second batch."""

    def test_dataloader(self) -> Loader:
        assert self.trainer is not None
        loaders = Loader(batch_of(4, 5), batch_of(2, 3)), Loader(batch_of(1, 4), batch_of(0, 0))
        return loaders[self.trainer.global_rank]


def run_two_processes(run: Path) -> None:
    """The body of the script that Lightning's launcher starts twice."""
    trainer = trainer_for(run, strategy="ddp", devices=2, callbacks=[Huge()])
    trainer.test(Echo(), datamodule=UnevenBatches(), verbose=False)
    expected = [AccuracyCount(6 + Huge.start, 8 + Huge.start), AccuracyCount(1 + Huge.start, 4 + Huge.start)]
    assert counts(trainer, "test") == expected, counts(trainer, "test")


@pytest.mark.slow
def test_two_processes_sum_whole_numbers_exactly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nfrom pathlib import Path\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_per_rank import run_two_processes\n\n"
        "if __name__ == '__main__':\n    run_two_processes(Path(sys.argv[1]))\n"
    )
    run = tmp_path / "run"
    command = [sys.executable, str(script), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    start = Huge.start
    rows = [line.split(",")[:4] for line in (run / "per_rank.csv").read_text().splitlines()[1:]]
    assert rows == [
        ["test", "0", str(6 + start), str(8 + start)],
        ["test", "1", str(1 + start), str(4 + start)],
        ["test", "all", str(7 + 2 * start), str(12 + 2 * start)],
    ]
    assert done.stdout.count("Accuracy per rank") == 1
