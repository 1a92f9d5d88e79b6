"""`per_rank.csv`, its intervals and flags, and `predictions.csv`: on one process, on replicas, on several processes."""

import csv
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import TINY, graded, launch, mode_flags, run_here
from counting import Operators
from data_files import draw_pictures
from lightning.pytorch import Trainer
from tiny_task import CLASSES, TinyData, TinyTask, read_events, tiny_trainer

from lit_cifar.data.synthetic import Synthetic
from lit_cifar.reporting.evaluation_tables import EvaluationTables, write_confusion, write_per_rank
from lit_cifar.reporting.predictions import PredictionWriter
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, log_chance, pooled


def data_of(correct: int, total: int, *, batch_size: int) -> TinyData:
    """The first `correct` of its images are right, in every split."""
    data, labels = TinyData(num_images=total, batch_size=batch_size), torch.arange(total) % 3
    answers = torch.where(torch.arange(total) < correct, labels, (labels + 1) % 3)
    for split, own in data.sets.items():
        own.images[:, 0, 0, 0], own.images[:, 0, 0, 1] = answers.to(torch.uint8), 64
        data.sets[split] = replace(own, labels=labels)
    return data


def trainer_for(run: Path, **options: Any) -> Trainer:
    return tiny_trainer(run, **{"callbacks": [EvaluationTables()], "max_epochs": None} | options)


def counts(trainer: Trainer, split: str) -> list[AccuracyCount]:
    (callback,) = (callback for callback in trainer.callbacks if isinstance(callback, EvaluationTables))
    return callback.counts[split]


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_events(run).Scalars(tag)]


def rows_of_table(text: str) -> dict[str, list[str]]:
    """By rank, the cells of the table that is printed."""
    lines = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}


def test_one_process_counts_each_batch_and_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_for(tmp_path)
    trainer.test(TinyTask(), datamodule=data_of(5, 9, batch_size=4))
    assert counts(trainer, "test") == [AccuracyCount(5, 9)]
    rows = "split,rank,correct,total,accuracy\ntest,0,5,9,0.555556\ntest,all,5,9,0.555556\n"
    assert (tmp_path / "per_rank.csv").read_text() == rows
    assert scalars(tmp_path, "test/acc_rank0") == [(0, pytest.approx(5 / 9))]
    printed = capsys.readouterr().out
    assert "Accuracy per rank, test, tiny" in printed
    # Wilson's interval of 5 in 9, as in Wilson's formula by hand
    assert rows_of_table(printed)["all"] == ["5", "9", "55.56%", "26.67% to 81.12%", ""]


def test_fit_counts_each_validation_afresh_and_prints_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_for(tmp_path, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(TinyTask(), datamodule=data_of(5, 9, batch_size=5))
    assert counts(trainer, "val") == [AccuracyCount(5, 9)]
    assert scalars(tmp_path, "val/acc_rank0") == [(1, pytest.approx(5 / 9)), (3, pytest.approx(5 / 9))]
    assert "Accuracy per rank" not in capsys.readouterr().out
    trainer.validate(TinyTask(), datamodule=data_of(1, 2, batch_size=2))
    assert "Accuracy per rank, val, tiny" in capsys.readouterr().out
    assert "val,all,1,2,0.500000\n" in (tmp_path / "per_rank.csv").read_text()


class RunByMode(TinyTask):
    """The mode runs its network."""

    def use_forward_fn(self, forward_fn: Any) -> None:
        self.forward = forward_fn


def test_a_rank_is_a_replica_where_a_process_holds_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_for(tmp_path, strategy="dp", devices=3)
    trainer.test(RunByMode(), datamodule=data_of(400, 602, batch_size=600))
    # chunks of 200, 200, 200 and of 1, 1, none
    assert counts(trainer, "test") == [AccuracyCount(200, 201), AccuracyCount(200, 201), AccuracyCount(0, 200)]
    flags = {rank: cells[-1] for rank, cells in rows_of_table(capsys.readouterr().out).items()}
    assert flags == {"0": "", "1": "", "2": "yes", "all": ""}


def test_a_split_replaces_its_rows_and_a_failed_write_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_per_rank(tmp_path, "val", [AccuracyCount(1, 2), AccuracyCount(2, 2)])
    write_per_rank(tmp_path, "test", [AccuracyCount(3, 4)])
    write_per_rank(tmp_path, "val", [AccuracyCount(0, 0)])
    monkeypatch.setattr(csv, "writer", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_per_rank(tmp_path, "val", [AccuracyCount(2, 2)])
    rows = ["test,0,3,4,0.750000", "test,all,3,4,0.750000", "val,0,0,0,nan", "val,all,0,0,nan"]
    assert (tmp_path / "per_rank.csv").read_text().splitlines()[1:] == rows


def test_another_split_is_kept(tmp_path: Path) -> None:
    for split, hits in (("val", 1), ("test", 2), ("val", 3)):
        write_confusion(tmp_path, split, ["cat", "dog"], [[0, 0, hits], [1, 0, 1]])
    rows = ["split,class,predicted,count", "test,cat,cat,2", "test,dog,cat,1", "val,cat,cat,3", "val,dog,cat,1"]
    assert (tmp_path / "confusion.csv").read_text().splitlines() == rows


@pytest.mark.slow
def test_no_run_makes_a_number_for_each_pair_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and time grow with the classes, and neither table nor events have a line for each."""
    made = []
    for num_classes in (1_000, 10_000):
        run, classes = tmp_path / str(num_classes), tuple(f"class {label}" for label in range(num_classes))
        monkeypatch.setattr(Synthetic, "classes", classes)
        with Operators() as operators:
            run_here("fit", *TINY, "--figures.every_n_epochs=1", f"--run_dir={run}")
        made.append(operators.num_bytes)
        assert operators.largest < 4 * num_classes**2
        assert 1 < len((run / "confusion.csv").read_text().splitlines()) <= 1 + 16
        tags = read_events(run).Tags()
        assert tags["images"] == ["val/wrong"]
        assert len(tags["scalars"]) < 20
    assert made[1] < 10 * made[0]


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [  # R. G. Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_equals_the_published_values(correct: int, total: int, low: float, high: float) -> None:
    assert AccuracyCount(correct, total).interval() == pytest.approx((low, high), abs=5e-5)


def brute_force(part: AccuracyCount, whole: AccuracyCount) -> float:
    """The probability of `log_chance` from binomial coefficients, as exact integers."""
    wrong = whole.total - whole.correct
    ways = {k: math.comb(whole.correct, k) * math.comb(wrong, part.total - k) for k in range(part.total + 1)}
    above = part.correct * whole.total >= whole.correct * part.total
    tail = sum(way for k, way in ways.items() if (k >= part.correct if above else k <= part.correct))
    return min(1.0, 2 * tail / math.comb(whole.total, part.total))


def test_chance_probability_equals_a_count_with_whole_numbers() -> None:
    draw = random.Random(0)
    for _ in range(300):
        part = AccuracyCount(draw.randint(0, n := draw.randint(0, 60)), n)
        rest = AccuracyCount(draw.randint(0, m := draw.randint(0, 200)), m)
        assert math.exp(log_chance(part, part + rest)) == pytest.approx(brute_force(part, part + rest), rel=1e-9)
    part, whole = AccuracyCount(1215, 1429), AccuracyCount(8937, 10000)  # of a test set
    assert math.exp(log_chance(part, whole)) == pytest.approx(brute_force(part, whole), rel=1e-6)


HONEST_AT_7_RANKS = [1290, 1276, 1301, 1268, 1294, 1283]


@pytest.mark.parametrize(
    ("correct", "total", "flagged"),
    [
        ([*HONEST_AT_7_RANKS, 1280], 1429, []),
        ([*HONEST_AT_7_RANKS, 1180], 1429, [6]),
        ([900, 800], 1000, [0, 1]),  # of two both or none
        ([900, 890], 1000, []),
        ([900, 895, 910, 800], 1000, [3]),  # without the bad one the third does not look too good
        ([9000, 8990, 9010, 500], 10000, [3]),  # with probabilities too small for a float
        ([7], 10, []),
        ([0] * 3, 0, []),
        ([5000] * 2, 5000, []),
        ([], 0, []),
    ],
)
def test_only_ranks_beyond_chance_are_flagged(correct: list[int], total: int, flagged: list[int]) -> None:
    found = [AccuracyCount(each, total) for each in correct]
    assert deviates(found) == [rank in flagged for rank in range(len(found))]
    assert all(math.isnan(count.accuracy) and count.interval() == (0.0, 1.0) for count in found if not count.total)


def test_ranks_with_hardly_any_samples_are_not_flagged_and_the_level_is_shared_among_the_ranks() -> None:
    """3 of 3 wrong against 9 of 9 right has probability 2/220 = 0.0091: enough alone, not with a second comparison."""
    assert deviates([AccuracyCount(0, 5000), AccuracyCount(0, 1)]) == [False, False]
    assert deviates([AccuracyCount(4000, 5000), AccuracyCount(0, 0)]) == [False, False]
    few = [AccuracyCount(0, 3), AccuracyCount(9, 9)]
    assert math.exp(log_chance(few[0], pooled(few))) == pytest.approx(2 / 220)
    assert deviates(few) == [False, False]
    assert deviates(few, level=0.02) == [True, True]


NAMES = ("b.png", 'odd, "name".png', "broken.png", "sub/a.jpg", "notes.txt", "z.png")
ERRORS = (None, None, "truncated, at byte 7", None, "not an image", None)


def folder_data() -> TinyData:
    data = TinyData(num_images=4, batch_size=2)
    data.files = dict(zip(NAMES, ERRORS, strict=True))
    return data


def predict(folder: Path, **settings: Any) -> list[list[str]]:
    trainer = tiny_trainer(folder, callbacks=[PredictionWriter()], **settings)
    trainer.predict(TinyTask(), datamodule=folder_data(), return_predictions=False)
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.reader(file))


def expected_rows() -> list[list[str]]:
    images = folder_data().sets["predict"].images
    results = iter(TinyTask()(images.float()).detach().softmax(dim=1))
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
    _, *rows = predict(tmp_path, limit_predict_batches=1)
    assert rows[:3] == expected_rows()[:3]
    unreached = "not classified: the run was limited to fewer batches"
    assert [row[3] for row in rows[3:]] == [unreached, "not an image", unreached]


@pytest.mark.parametrize("mode", graded("ddp", slow=["tp"]))
def test_two_ranks_write_one_table(mode: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of one; each has a part of the pictures, or both have all. A run of few steps writes nothing."""
    monkeypatch.chdir(tmp_path)
    draw_pictures(tmp_path / "pictures", 5)
    (tmp_path / "pictures" / "no\rpicture").touch()
    given = [f"--ckpt_path={trained / 'checkpoints' / 'last.ckpt'}", f"--data.predict_dir={tmp_path / 'pictures'}"]
    words = ["predict", *TINY, *given, "--trainer.precision=64-true"]
    run_here(*words, f"--run_dir={tmp_path / 'one'}", "--data.memory_gb=0")
    launch(*words, *mode_flags(mode), f"--run_dir={tmp_path / 'two'}", ranks=2)
    one, two = ((tmp_path / run / "predictions.csv").read_text() for run in ("one", "two"))
    assert one == two
    assert len(one.splitlines()) == 7
    assert "no\\rpicture,,," in one
    run_here(*words, "--trainer.fast_dev_run=1")
    assert {path.name for path in tmp_path.iterdir()} == {"pictures", "one", "two"}
