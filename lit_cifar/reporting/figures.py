"""Figures of an evaluation in TensorBoard: accuracy per class, confusion matrix, the most confident mistakes.

Figures are drawn with matplotlib's objects alone: no pyplot, no window, no global state.
"""

import math
import re
import time
from collections.abc import Sequence
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.errors import bounded, one_line, printable
from lit_cifar.reporting.evaluation_tables import Split, datamodule_of, split_of
from lit_cifar.reporting.loggers import log_to_tensorboard, logged_step, tensorboard_writer
from lit_cifar.reporting.run_folder import SELDOM_S

_IMAGE_SIDE = 160  # side in pixels at which an image of any size is drawn
_MOST_CLASSES = 20  # more classes get no numbers and not all names: their texts would take minutes
_MOST_DRAWN = 200  # more classes get neither curves nor a matrix: nobody could read them
_MOST_WRONG = 16  # images shown of those that were classified wrongly
_LONGEST = 16  # most characters of a name
_SPLIT_WORDS: dict[Split, str] = {"val": "validation", "test": "test"}


class Evaluation(NamedTuple):
    """What the figures of an evaluation show."""

    split: Split
    step: int
    title: str
    mistakes: int
    worst: Tensor  # of the most confident mistakes, as `Mistakes` computes them
    confusion: Tensor | None = None  # counts with the truth in rows, int64, (C, C), on the CPU; None of many classes


class EvaluationFigures(Callback):
    """Draws evaluations into TensorBoard.

    All processes gather the numbers. Only rank 0 draws, in a thread beside the training that follows. The end of a run
    waits for that thread. A run that is stopped may lack its latest figures. What cannot be drawn is a warning.

    Tags, with `test` in place of `val` for a test: `val/acc_class/NAME`, the accuracy of a class, left out if it has
    no samples; `val/confusion`; `val/wrong`, the most confident mistakes: of more than 200 classes only that.

    Args:
        every_n_epochs: Draw every n-th epoch of a fit, and its last and its most accurate one when it ends. With null
            epochs are left out that end less than 30 seconds after the start or the last drawing, which takes a core
            some tenths of a second. With 0 nothing is drawn, even in `validate` and `test`.
    """

    def __init__(self, *, every_n_epochs: int | None = None) -> None:
        self.every_n_epochs = bounded("--figures.every_n_epochs", every_n_epochs, 0)
        self._drawing: Thread | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._best: Evaluation | None = None
        self._newest: Evaluation | None = None
        self._drawn: set[int] = set()  # steps of the evaluations that are drawn
        self._drawn_at = time.monotonic()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mistakes = Mistakes()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Batch, *_: Any) -> None:
        if self.every_n_epochs != 0:
            self._mistakes.update(outputs, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Read the numbers here. The others must not wait for the clock of rank 0, by which it draws."""
        if trainer.sanity_checking or self.every_n_epochs == 0:
            return
        split = split_of(trainer)
        truths, predictions, counts = pl_module.confusion_matrix(split).compute().cpu().unbind(dim=1)
        worst = self._mistakes.compute()[:_MOST_WRONG]
        if tensorboard_writer(trainer) is None:  # on every rank but 0, and without TensorBoard
            return
        data, is_due = datamodule_of(trainer), True
        title, mistakes = f"{data.name}, {_SPLIT_WORDS[split]}", int(counts[truths != predictions].sum())
        if trainer.state.fn == "fit":
            epoch, waited_s = trainer.current_epoch + 1, time.monotonic() - self._drawn_at
            title += f", epoch {epoch}"
            is_due = waited_s >= SELDOM_S if self.every_n_epochs is None else epoch % self.every_n_epochs == 0
        found = Evaluation(split, logged_step(trainer), title, mistakes, worst)
        if len(data.classes) <= _MOST_DRAWN:
            matrix = torch.zeros(len(data.classes), len(data.classes), dtype=torch.int64)
            found = found._replace(confusion=matrix.index_put_((truths, predictions), counts))
            accuracies = class_accuracies(matrix, data.classes)
            log_to_tensorboard(trainer, {f"{split}/acc_class/{name}": value for name, value in accuracies.items()})
        self._newest = found
        if self._best is None or mistakes < self._best.mistakes:
            self._best = found
        if is_due:
            self._draw(trainer, [found])

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end: Any = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ends = {each.step: each for each in (self._best, self._newest) if each is not None}
        if missing := [each for step, each in ends.items() if step not in self._drawn]:
            self._draw(trainer, missing)

    def _draw(self, trainer: Trainer, chosen: Sequence[Evaluation]) -> None:
        """Look up images here and draw in a thread, so that training does not wait."""
        self._finish_drawing()
        self._drawn.update(each.step for each in chosen)
        self._drawn_at = time.monotonic()
        data, writer = datamodule_of(trainer), tensorboard_writer(trainer)
        wrong = [_look_up(data.sets[each.split], each.worst) for each in chosen]

        def draw() -> None:
            try:
                for each, images in zip(chosen, wrong, strict=True):
                    _write(writer, each, images, data.classes)
            except Exception as error:
                problem, rest = f"{type(error).__name__}: {one_line(error)}", "the run goes on without them"
                rank_zero_warn(f"figures of an evaluation cannot be drawn ({problem:.300}); {rest}")

        self._drawing = Thread(target=draw, name="figures")
        self._drawing.start()

    def _finish_drawing(self, *_: Any, **__: Any) -> None:
        if self._drawing is not None:
            self._drawing.join()
        self._drawing = None

    teardown = on_exception = _finish_drawing  # while the writer is open


def _write(writer: Any, found: Evaluation, wrong: Sequence[tuple[Tensor, str]], classes: Sequence[str]) -> None:
    listed = f"{found.title}\nthe most confident of {found.mistakes:,} mistakes"
    figures = {"wrong": wrong_images_figure(wrong, title=listed)}
    if found.confusion is not None:
        figures["confusion"] = confusion_figure(found.confusion, classes, title=found.title)
    for name, figure in sorted(figures.items()):
        writer.add_image(f"{found.split}/{name}", render(figure), found.step, dataformats="HWC")


class Mistakes(Metric):
    """The samples that were classified wrongly; the host waits for no batch."""

    rows: list[Tensor]  # float64, (n, 3), of a batch each: confidence, or -1 if it is right; id; predicted label

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Keep a batch of n >= 0 samples; `logits` is (n, C)."""
        confidence, predictions = logits.detach().float().softmax(dim=1).max(dim=1)
        confidence = torch.where(predictions == batch.labels, -1.0, confidence.double())
        self.rows.append(torch.stack([confidence, batch.ids, predictions], dim=1))

    def compute(self) -> Tensor:
        """Confidences, ids and predicted labels of all processes, the most confident first: float64, (m, 3), CPU.

        Ties go to the smaller id, so that the order does not depend on which process has which sample.
        """
        rows = dim_zero_cat(self.rows).cpu().numpy()
        rows = rows[rows[:, 0] >= 0]
        _, first = np.unique(rows[:, 1], return_index=True)  # a padded evaluation yields a sample twice
        return torch.from_numpy(rows[first][np.argsort(-rows[first, 0], kind="stable")])


def class_accuracies(confusion: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """The accuracy of each class, by a name that is valid as a tag; classes without samples are left out.

    `confusion` is int64, (C, C), on the CPU, with the truth in rows. Where two tags are one (C++, C#), all get numbers.
    """
    tags = [re.sub(r"[^\w.-]+", "_", name) for name in classes]
    if len(set(tags)) < len(tags):
        tags = [f"{tag}.{label}" for label, tag in enumerate(tags)]
    hits, totals = confusion.diagonal().tolist(), confusion.sum(dim=1).tolist()
    return {tag: hit / total for tag, hit, total in zip(tags, hits, totals, strict=True) if total}


def _look_up(images: ImageSet, worst: Tensor) -> list[tuple[Tensor, str]]:
    """The images, and a text for each."""
    chosen = worst[:, 1].long().to(images.labels.device)
    pixels, truths = images.gather(chosen).cpu(), images.labels[chosen].tolist()
    names = images.classes
    return [
        (image, f"is {_shortened(names[truth])}\ntaken for {_shortened(names[int(prediction)])}\n{confidence:.1%} sure")
        for image, truth, (confidence, _, prediction) in zip(pixels, truths, worst.tolist(), strict=True)
    ]


def confusion_figure(confusion: Tensor, classes: Sequence[str], *, title: str) -> Figure:
    """Counts in cells, coloured by their share of the row; many classes get no counts, and only some names.

    `confusion` is int64, (C, C), on the CPU; rows are the truth, columns the predictions of the C `classes`.
    """
    counts = confusion.numpy()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    num_classes = len(classes)
    side = 3.0 + 0.5 * min(num_classes, _MOST_CLASSES)
    figure = Figure(figsize=(side + 0.4, side - 0.4), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    # Square cells would make the layout push the name of the axis over the edge.
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    named = range(0, num_classes, math.ceil(num_classes / _MOST_CLASSES))
    names = [_shortened(classes[label]) for label in named]
    axes.set_xticks(named, names, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
    axes.set_yticks(named, names, parse_math=False)
    right, total = int(np.trace(counts)), int(counts.sum())
    share = f" ({right / total:.2%})" if total else ""
    axes.set_title(f"{title}\n{right:,} of {total:,} right{share}", parse_math=False)
    axes.set(xlabel="predicted class", ylabel="true class")
    for (row, column), count in np.ndenumerate(counts if num_classes <= _MOST_CLASSES else counts[:0]):
        color = "white" if shares[row, column] > 0.5 else "black" if count else "silver"
        text = axes.text(column, row, f"{count}", ha="center", va="center", color=color, fontsize=9)
        text.set_in_layout(False)  # the layout does not need it, and a hundred texts would take half of the time
    figure.colorbar(image, ax=axes, fraction=0.046, label="share of the true class")
    return figure


def wrong_images_figure(wrong: Sequence[tuple[Tensor, str]], *, title: str) -> Figure:
    """A grid of images, uint8, (3, H, W), on the CPU, with their texts, in the given order; "none" without any."""
    # Pixels and texts without axes: drawing one axes takes as long as all of these.
    columns = min(4, max(1, len(wrong)))
    width, height = max(600, 200 * columns), 80 + 230 * max(1, math.ceil(len(wrong) / columns))
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    figure.suptitle(title, y=1 - 20 / height, va="top", parse_math=False)
    if not wrong:
        figure.text(0.5, 0.5, "none", ha="center", va="center")
    for position, (pixels, text) in enumerate(wrong):
        left, top = 20 + 200 * (position % columns), height - 140 - 230 * (position // columns)
        # BOX takes means of a larger image, and repeats pixels of a smaller one.
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((_IMAGE_SIDE,) * 2, Image.Resampling.BOX)
        figure.figimage(np.asarray(image), left, top - _IMAGE_SIDE)
        place = (left + _IMAGE_SIDE / 2) / width, (top + 5) / height
        figure.text(*place, text, ha="center", va="bottom", fontsize=9, parse_math=False)
    return figure


def _shortened(name: str) -> str:
    """The beginning of a long name, without what would steer a terminal or break a file."""
    name = printable(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"


def render(figure: Figure) -> npt.NDArray[np.uint8]:
    """The figure's pixels, (H, W, 3)."""
    canvas: Any = FigureCanvasAgg(figure)  # matplotlib leaves it untyped
    canvas.draw()
    return np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3]
