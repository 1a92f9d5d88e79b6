"""Figures of an evaluation: the right images, the right counts, on every number of processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from tiny_task import CLASSES, TinyData, TinyTask, read_events, tiny_trainer
from torch import Tensor

from lit_cifar.data.images import Batch
from lit_cifar.reporting import figures
from lit_cifar.reporting.figures import EvaluationFigures, Mistakes, class_accuracies


def batch_of(ids: Tensor, labels: Tensor) -> Batch:
    return Batch(torch.zeros(len(ids), 3, 32, 32), labels, ids, 1.0)


def test_mistakes_are_sorted_however_samples_are_cut_into_batches() -> None:
    """The most confident first, ties by id; a sample once that two processes have, as where one is padded."""
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, so that many confidences are equal.
    logits = torch.randint(0, 4, (50, 3), generator=generator).float()
    labels = torch.randint(0, 3, (50,), generator=generator)
    confidence, predictions = logits.softmax(dim=1).max(dim=1)
    wrong = [int(i) for i in (predictions != labels).nonzero()]
    expected = sorted(wrong, key=lambda i: (-float(confidence[i]), i))
    rows = torch.stack([confidence[expected].double(), torch.tensor(expected), predictions[expected]], dim=1)
    for batch_size in (1, 7, 50):
        mistakes = Mistakes()
        for ids in [*torch.arange(50).split(batch_size), torch.arange(0), torch.arange(9)]:
            mistakes.update(logits[ids], batch_of(ids, labels[ids]))
        assert mistakes.compute().equal(rows)


def test_confusion_figure_shows_names_and_counts() -> None:
    confusion = torch.tensor([[30, 1, 0], [0, 2, 2], [0, 0, 0]])
    figure = figures.confusion_figure(confusion, CLASSES, title="tiny")
    axes = figure.axes[0]

    assert [label.get_text() for label in axes.get_yticklabels()] == list(CLASSES)
    assert [label.get_text() for label in axes.get_xticklabels()] == list(CLASSES)
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("true class", "predicted class")
    cells = {tuple(int(p) for p in text.get_position()): text for text in axes.texts}
    assert {(x, y): int(text.get_text()) for (x, y), text in cells.items()} == {
        (column, row): int(confusion[row, column]) for row in range(3) for column in range(3)
    }
    assert axes.images[0].get_array().tolist() == [[30 / 31, 1 / 31, 0], [0, 0.5, 0.5], [0, 0, 0]]


def test_an_evaluation_writes_accuracies_and_figures(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures()])
    trainer.test(TinyTask(), datamodule=TinyData(), verbose=False)
    events = read_events(tmp_path)
    data = TinyData().sets["test"]
    right = data.images[:, 0, 0, 0].long() == data.labels
    for label, tag in ((0, "T-shirt_top"), (1, "disc_plain")):
        (scalar,) = events.Scalars(f"test/acc_class/{tag}")
        assert scalar.value == pytest.approx(float(right[data.labels == label].float().mean()))
    assert "test/acc_class/cat" not in events.Tags()["scalars"]
    assert events.Tags()["images"] == ["test/confusion", "test/wrong"]
    assert class_accuracies(torch.eye(2), ["C++", "C#"]) == {"C_.0": 1, "C_.1": 1}


class BestSecond(TinyTask):
    """All of its answers are right in the second epoch."""

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        found = batch.images[:, 0, 0, 0].long() if self.current_epoch == 1 else batch.labels
        return super().validation_step(batch._replace(labels=found), batch_idx)


@pytest.mark.parametrize(
    ("every", "drawn"),
    [({}, [5, 11]), ({"every_n_epochs": 1}, [2, 5, 8, 11]), ({"every_n_epochs": 3}, [8, 5, 11])],
)
@pytest.mark.parametrize("limits", [{"max_epochs": 4}, {"max_epochs": 9, "max_steps": 12}])
def test_fit_draws_its_best_and_last_epoch_and_those_that_are_due(
    every: dict[str, int], drawn: list[int], limits: dict[str, int], tmp_path: Path
) -> None:
    """Three batches an epoch, and no sanity check."""
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures(**every)], num_sanity_val_steps=2, **limits)
    trainer.fit(BestSecond(), datamodule=TinyData())
    assert [image.step for image in read_events(tmp_path).Images("val/wrong")] == drawn


@pytest.mark.parametrize("side", [32, 640])
def test_wrong_images_figure_shows_the_pixels_it_was_given(side: int) -> None:
    image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
    figure = figures.wrong_images_figure([(image, "is $0_$5\ntaken for dog")] * 5, title="tiny")
    assert figure.texts[-1].get_text() == "is $0_$5\ntaken for dog"
    drawn = figures.render(figure)[140:300, 20:180]  # the first, with nothing over it
    expected = image.float() if side <= 160 else torch.nn.functional.avg_pool2d(image.float(), side // 160)
    repeats = max(160 // side, 1)
    assert np.abs(drawn[::repeats, ::repeats] - expected.permute(1, 2, 0).numpy()).max() <= 1  # means are rounded twice
    assert figures.render(figures.wrong_images_figure([], title="tiny")).min() < 128


def test_a_figure_that_cannot_be_drawn_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(figure: Figure) -> Any:
        raise OSError("no font")

    monkeypatch.setattr(figures, "render", broken)
    trainer = tiny_trainer(tmp_path, callbacks=[EvaluationFigures()], max_epochs=2)
    with pytest.warns(UserWarning, match=r"cannot be drawn \(OSError: no font\); the run goes on"):
        trainer.fit(TinyTask(), datamodule=TinyData())
    assert trainer.global_step == 6
