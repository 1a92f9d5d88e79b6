"""Figures of an evaluation: the right images, the right counts, on every number of processes."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from matplotlib.figure import Figure
from tiny_task import CLASSES, TinyData, TinyTask, fake_trainer, read_events, tiny_trainer
from torch import Tensor

from lit_cifar.data.images import Batch
from lit_cifar.reporting.figures import (
    EvaluationFigures,
    MostConfidentMistakes,
    WrongImage,
    class_accuracies,
    confusion_figure,
    render,
    wrong_images_figure,
)
from lit_cifar.reporting.loggers import RunSettings
from lit_cifar.reporting.progress import ProgressBar, Throughput
from lit_cifar.reporting.run_report import RunReport


def batch_of(ids: Tensor, labels: Tensor) -> Batch:
    return Batch(torch.zeros(len(ids), 3, 32, 32), labels, ids, 1.0)


def brute_force(logits: Tensor, labels: Tensor, k: int) -> list[int]:
    """Ids of the k most confident mistakes, ties by id."""
    confidence, predictions = logits.softmax(dim=1).max(dim=1)
    wrong = [int(i) for i in (predictions != labels).nonzero()]
    return sorted(wrong, key=lambda i: (-float(confidence[i]), i))[:k]


@pytest.mark.parametrize("k", [1, 4, 100])
@pytest.mark.parametrize("batch_size", [1, 7, 50])
def test_mistakes_equal_a_sort_of_all_samples(k: int, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(k)
    # Whole numbers, so that many confidences are equal.
    logits = torch.randint(0, 4, (50, 3), generator=generator).float()
    labels = torch.randint(0, 3, (50,), generator=generator)
    worst = MostConfidentMistakes(k)
    for ids in torch.arange(50).split(batch_size):
        worst.update(logits[ids], batch_of(ids, labels[ids]))
        worst.update(torch.zeros(0, 3), batch_of(ids[:0], labels[:0]))

    confidences, ids, predictions = worst.gather(fake_trainer())

    assert ids == brute_force(logits, labels, k)
    assert predictions == logits[ids].argmax(dim=1).tolist()
    assert confidences == pytest.approx(logits[ids].softmax(dim=1).amax(dim=1).tolist())


def test_mistakes_of_two_processes_count_a_padded_sample_once() -> None:
    logits = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    worst = MostConfidentMistakes(4)
    worst.update(logits, batch_of(torch.arange(3), torch.tensor([1, 1, 1])))
    trainer = fake_trainer()
    trainer.strategy.all_gather = lambda tensor: torch.stack([tensor, tensor])

    confidences, ids, predictions = worst.gather(trainer)

    assert ids == [1, 0]
    assert predictions == [0, 0]
    assert confidences == pytest.approx(logits[ids].softmax(dim=1).amax(dim=1).tolist())


def test_mistakes_without_samples_or_mistakes() -> None:
    worst = MostConfidentMistakes(4)
    assert worst.gather(fake_trainer()) == ([], [], [])
    worst.update(torch.eye(3), batch_of(torch.arange(3), torch.arange(3)))
    assert worst.gather(fake_trainer()) == ([], [], [])


def test_class_accuracies_have_tags_and_leave_out_empty_classes() -> None:
    confusion = torch.tensor([[3, 1, 0], [0, 2, 2], [0, 0, 0]])
    accuracies = torch.tensor([0.75, 0.5, 0.0])
    assert class_accuracies(accuracies, confusion, CLASSES) == {"T-shirt_top": 0.75, "disc_plain": 0.5}
    assert class_accuracies(accuracies, confusion, ["C++", "C#", "C"]) == {"C_.0": 0.75, "C_.1": 0.5}


def test_confusion_figure_shows_names_and_counts() -> None:
    confusion = torch.tensor([[30, 1, 0], [0, 2, 2], [0, 0, 0]])
    figure = confusion_figure(confusion, CLASSES, title="tiny")
    axes = figure.axes[0]

    assert [label.get_text() for label in axes.get_yticklabels()] == list(CLASSES)
    assert [label.get_text() for label in axes.get_xticklabels()] == list(CLASSES)
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("true class", "predicted class")
    cells = {tuple(int(p) for p in text.get_position()): text for text in axes.texts}
    assert {(x, y): int(text.get_text()) for (x, y), text in cells.items()} == {
        (column, row): int(confusion[row, column]) for row in range(3) for column in range(3)
    }
    assert cells[0, 0].get_color() == "white"  # on dark blue
    assert cells[2, 1].get_color() == "black"
    assert cells[0, 2].get_color() == "silver"  # a zero
    assert axes.images[0].get_array().tolist() == [[30 / 31, 1 / 31, 0], [0, 0.5, 0.5], [0, 0, 0]]


@pytest.mark.parametrize(("num_classes", "numbers", "names"), [(30, 900, 30), (31, 0, 16), (100, 0, 25)])
def test_confusion_figure_of_many_classes_is_no_larger(num_classes: int, numbers: int, names: int) -> None:
    classes = [f"$\\frac{{ {label} {'x' * 200}" for label in range(num_classes)]
    figure = confusion_figure(torch.eye(num_classes, dtype=torch.int64), classes, title="tiny\ntwo lines")
    pixels = render(figure)
    assert pixels.shape == (1140, 1240, 3)
    assert (pixels[:, :3] == 255).all()  # nothing is cut off
    assert len(figure.axes[0].texts) == numbers
    assert len(figure.axes[0].get_xticklabels()) == len(figure.axes[0].get_yticklabels()) == names
    assert figure.axes[0].images[0].get_array().shape == (num_classes, num_classes)


@pytest.mark.parametrize("side", [1, 100, 224, 640])
def test_wrong_images_of_any_size_have_one_size_in_the_figure(side: int) -> None:
    image = torch.full((3, side, side), 77, dtype=torch.uint8)
    figure = wrong_images_figure([WrongImage(image, "$0_$5", "$\\frac{", 0.9)], title="tiny")
    assert (render(figure)[140:300, 20:180] == 77).all()
    assert figure.images[0].get_array().shape == (160, 160, 3)


def test_wrong_images_figure_shows_the_pixels_it_was_given() -> None:
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    figure = wrong_images_figure([WrongImage(image, "cat", "dog", 0.987)] * 5, title="tiny")

    assert len(figure.images) == 5
    assert np.array_equal(figure.images[4].get_array()[::5, ::5], image.permute(1, 2, 0).numpy())
    assert figure.texts[-1].get_text() == "is cat\ntaken for dog\n98.7% sure"
    drawn = render(figure)[140:300, 20:180]  # the first, with nothing over it
    assert np.array_equal(drawn[::5, ::5], image.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("count", [0, 1, 16])
def test_figures_render_to_pixels(count: int) -> None:
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    pixels = render(wrong_images_figure([WrongImage(image, "cat", "dog", 0.9)] * count, title="tiny"))
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
    assert pixels.min() < 128 < pixels.max()


def test_validate_writes_accuracies_and_figures(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures()])
    trainer.validate(TinyTask(), datamodule=TinyData(), verbose=False)
    events = read_events(tmp_path)
    data = TinyData().sets["val"]
    right = data.images[:, 0, 0, 0].long() == data.labels

    for label, tag in ((0, "T-shirt_top"), (1, "disc_plain")):
        (scalar,) = events.Scalars(f"val/acc_class/{tag}")
        assert scalar.value == pytest.approx(float(right[data.labels == label].float().mean()))
    assert "val/acc_class/cat" not in events.Tags()["scalars"]
    assert events.Tags()["images"] == ["val/confusion", "val/wrong"]


@pytest.mark.slow
@pytest.mark.timeout(300)  # starts two processes, which import everything anew
def test_two_processes_draw_the_same_figures_as_one(tmp_path: Path) -> None:
    for folder, settings in (("one", {}), ("two", {"strategy": "ddp_spawn", "devices": 2})):
        everything = [EvaluationFigures(), ProgressBar(), RunReport(), RunSettings(), Throughput()]
        settings |= {"callbacks": everything, "enable_progress_bar": True, "max_epochs": 2}
        trainer = tiny_trainer(tmp_path / folder, **settings)
        trainer.fit(TinyTask(), datamodule=TinyData(num_images=22))
    one, two = read_events(tmp_path / "one"), read_events(tmp_path / "two")

    assert one.Tags()["images"] == two.Tags()["images"] == ["val/confusion", "val/wrong"]
    for tag in one.Tags()["images"]:
        assert [image.encoded_image_string for image in one.Images(tag)] == [
            image.encoded_image_string for image in two.Images(tag)
        ]
        assert len(one.Images(tag)) == 2
    environments = [json.loads((tmp_path / folder / "environment.json").read_text()) for folder in ("one", "two")]
    assert [(found["strategy"], found["world_size"]) for found in environments] == [
        ("single_device", 1),
        ("ddp_spawn", 2),
    ]


@pytest.mark.parametrize(("every_n_epochs", "steps"), [(1, [3, 6, 9]), (2, [6, 9])])
def test_fit_draws_due_epochs_and_no_sanity_check(tmp_path: Path, every_n_epochs: int, steps: list[int]) -> None:
    figures = EvaluationFigures(every_n_epochs=every_n_epochs)
    trainer = tiny_trainer(tmp_path, callbacks=[figures], max_epochs=3, num_sanity_val_steps=2)
    trainer.fit(TinyTask(), datamodule=TinyData())
    # Three batches an epoch; the last epoch always has figures.
    assert [image.step for image in read_events(tmp_path).Images("val/wrong")] == steps


class Epochs(Callback):
    """Says when an epoch of training begins behind the first, and may end the run there."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.error = error

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch:
            self.begun.set()
            if self.error:
                raise self.error


def drawing_waits_for(begun: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(figure: Figure) -> Any:
        assert begun.wait(20), "training has waited for its figures"
        return render(figure)

    monkeypatch.setattr("lit_cifar.reporting.figures.render", late)


def test_training_does_not_wait_for_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = Epochs()
    drawing_waits_for(epochs.begun, monkeypatch)
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures(), epochs], max_epochs=2)
    trainer.fit(TinyTask(), datamodule=TinyData())
    assert [image.step for image in read_events(tmp_path).Images("val/wrong")] == [3, 6]


def test_a_run_that_fails_has_the_figures_that_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = Epochs(ValueError("failed"))
    drawing_waits_for(epochs.begun, monkeypatch)
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures(), epochs], max_epochs=2)
    with pytest.raises(ValueError, match="failed"):
        trainer.fit(TinyTask(), datamodule=TinyData())
    assert [image.step for image in read_events(tmp_path).Images("val/wrong")] == [3]


@pytest.mark.parametrize("max_epochs", [1, 2])
def test_a_figure_that_cannot_be_drawn_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_epochs: int
) -> None:
    def broken(figure: Figure) -> Any:
        raise OSError("no font")

    monkeypatch.setattr("lit_cifar.reporting.figures.render", broken)
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures()], max_epochs=max_epochs)
    with pytest.warns(UserWarning, match=r"cannot be drawn \(OSError: no font\); the run goes on") as warned:
        trainer.fit(TinyTask(), datamodule=TinyData())
    assert sum("cannot be drawn" in str(warning.message) for warning in warned) == 1
    assert trainer.global_step == 3 * max_epochs


def test_test_has_its_own_tags(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures()])
    trainer.test(TinyTask(), datamodule=TinyData(), verbose=False)
    assert read_events(tmp_path).Tags()["images"] == ["test/confusion", "test/wrong"]


def test_runs_without_tensorboard_draw_nothing(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures()], logger=False, default_root_dir=tmp_path)
    trainer.validate(TinyTask(), datamodule=TinyData(), verbose=False)
    assert list(tmp_path.iterdir()) == []
