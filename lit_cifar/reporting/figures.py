"""What an evaluation looks like in TensorBoard: accuracy per class, confusion matrix, the most confident mistakes."""

import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.errors import one_line
from lit_cifar.reporting.evaluation_callback import EvaluationCallback, Split
from lit_cifar.reporting.evaluation_plots import WrongImage, evaluation_figures, render
from lit_cifar.reporting.tensorboard import log_to_tensorboard, tensorboard_writer

SPLIT_WORDS: dict[Split, str] = {"val": "validation", "test": "test"}


class EvaluationFigures(EvaluationCallback):
    """Draws every evaluation into TensorBoard.

    All processes gather the numbers. Only rank 0 draws, in a thread beside the training that follows. The end of a run
    waits for that thread. A run that is killed may lack its latest figures. What cannot be drawn is a warning, once.

    Tags, with `test` in place of `val` for a test: `val/acc_class/NAME`, the accuracy of a class, left out if it has
    no samples; `val/confusion`; `val/wrong`, the misclassified images with the highest confidence.

    Args:
        num_wrong: Number of misclassified images to show, over all processes.
        every_n_epochs: Draw after every n-th epoch of a fit and after its last, which takes a core some tenths of a
            second. With 0 nothing is drawn, also in `validate` and `test`, nor the network's graph.
    """

    def __init__(self, *, num_wrong: int = 16, every_n_epochs: int = 1) -> None:
        self.num_wrong = num_wrong
        self.every_n_epochs = every_n_epochs
        self._worst = MostConfidentMistakes(num_wrong)
        self._drawing: Future[None] | None = None
        self._warned = False

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._worst = MostConfidentMistakes(self.num_wrong)

    def _count(self, trainer: Trainer, logits: Any, batch: Batch) -> None:
        if self._is_due(trainer):
            self._worst.update(logits, batch)

    def _finish(self, trainer: Trainer, pl_module: LightningModule, split: Split) -> None:
        if self._is_due(trainer):
            self._draw(trainer, pl_module, split)

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.sanity_checking or not self.every_n_epochs:
            return False
        if trainer.state.fn != "fit":
            return True
        epoch = trainer.current_epoch + 1
        return epoch % self.every_n_epochs == 0 or epoch == trainer.max_epochs

    def _draw(self, trainer: Trainer, pl_module: Any, split: Split) -> None:
        """Read the numbers here and draw in a thread, so that training does not wait."""
        details: dict[str, Tensor] = pl_module.evaluation_metrics(split).compute()
        confusion = details["confusion"].to("cpu", copy=True)  # it is drawn while counting continues
        confidence, ids, predictions = self._worst.gather(trainer)
        writer = tensorboard_writer(trainer)
        if writer is None:  # every rank but 0, and runs without TensorBoard
            return
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
        step, title = trainer.global_step, f"{datamodule.name}, {SPLIT_WORDS[split]}"
        if trainer.state.fn == "fit":
            title += f", epoch {trainer.current_epoch + 1}"
        accuracies = class_accuracies(details["acc_per_class"], confusion, datamodule.classes)
        log_to_tensorboard(trainer, {f"{split}/acc_class/{name}": value for name, value in accuracies.items()})
        wrong = _look_up(datamodule.sets[split], confidence, ids, predictions)

        def draw() -> None:
            for name, figure in evaluation_figures(confusion, wrong, datamodule.classes, title=title).items():
                writer.add_image(f"{split}/{name}", render(figure), step, dataformats="HWC")

        self._finish_drawing()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="figures")
        self._drawing = thread.submit(draw)
        thread.shutdown(wait=False)

    def _finish_drawing(self) -> None:
        """Wait for the previous figures, and warn of the first that could not be drawn."""
        drawing, self._drawing = self._drawing, None
        error = None if drawing is None else drawing.exception()
        if error is not None and not self._warned:
            self._warned = True
            problem = f"{type(error).__name__}: {one_line(error)}"
            rank_zero_warn(f"figures of an evaluation cannot be drawn ({problem:.300}); the run goes on without them")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish drawing while the writer is open."""
        self._finish_drawing()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish drawing; an error in it is not raised beside `exception`."""
        if self._drawing is not None:
            wait([self._drawing])
        self._drawing = None


class MostConfidentMistakes:
    """The k samples that were classified wrongly with the highest softmax probability.

    `update` stays on the device and never waits for it. Ties go to the smaller id, so that the choice does not depend
    on which process has which sample.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._confidence: Tensor | None = None
        self._choice: Tensor | None = None

    def update(self, logits: Tensor, batch: Batch) -> None:
        """Consider a batch of n >= 0 samples whose ids follow those of the batches before; `logits` is (n, C)."""
        confidence, predictions = logits.detach().float().softmax(dim=1).max(dim=1)
        confidence = torch.where(predictions == batch.labels, -1.0, confidence)
        choice = torch.stack([batch.ids, predictions], dim=1)
        if self._confidence is not None and self._choice is not None:
            confidence = torch.cat([self._confidence, confidence])
            choice = torch.cat([self._choice, choice])
        best = confidence.argsort(descending=True, stable=True)[: self.k]
        self._confidence, self._choice = confidence[best], choice[best]

    def gather(self, trainer: Trainer) -> tuple[list[float], list[int], list[int]]:
        """Confidences, ids and predicted labels of the k worst over all processes; each process must call this."""
        device = trainer.strategy.root_device
        # Processes may hold fewer than k, even none; collectives want equal shapes.
        confidence = torch.full((self.k,), -1.0, device=device)
        choice = torch.full((self.k, 2), -1, dtype=torch.int64, device=device)
        if self._confidence is not None and self._choice is not None:
            confidence[: len(self._confidence)] = self._confidence
            choice[: len(self._choice)] = self._choice
        # With one process all_gather returns its argument, else it adds a dimension in front.
        confidences = trainer.strategy.all_gather(confidence).reshape(-1).cpu().numpy()
        choices = trainer.strategy.all_gather(choice).reshape(-1, 2).cpu().numpy()

        wrong = confidences >= 0
        # A sample is here twice when evaluation is padded; np.unique also sorts by id.
        ids, first = np.unique(choices[wrong, 0], return_index=True)
        confidences, predictions = confidences[wrong][first], choices[wrong, 1][first]
        order = np.argsort(-confidences, kind="stable")[: self.k]
        return confidences[order].tolist(), ids[order].tolist(), predictions[order].tolist()


def class_accuracies(accuracies: Tensor, confusion: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """The accuracy of each class, by a name that is valid as a tag; classes without samples are left out.

    `accuracies` is float, (C,); `confusion` int64, (C, C), with the truth in rows.
    """
    totals = confusion.sum(dim=1).tolist()
    return {
        tag: accuracy for tag, accuracy, total in zip(_tags(classes), accuracies.tolist(), totals, strict=True) if total
    }


def _tags(classes: Sequence[str]) -> list[str]:
    """A tag for each class; with its number where two names would else have the same, as C++ and C# would."""
    tags = [re.sub(r"[^\w.-]+", "_", name) for name in classes]
    return tags if len(set(tags)) == len(tags) else [f"{tag}.{label}" for label, tag in enumerate(tags)]


def _look_up(
    images: ImageSet, confidences: Sequence[float], ids: Sequence[int], predictions: Sequence[int]
) -> list[WrongImage]:
    chosen = torch.tensor(ids, dtype=torch.int64).to(images.labels.device)
    pixels, truths = images.images[chosen].cpu(), images.labels[chosen].tolist()
    return [
        WrongImage(image, images.classes[truth], images.classes[prediction], confidence)
        for image, truth, prediction, confidence in zip(pixels, truths, predictions, confidences, strict=True)
    ]
