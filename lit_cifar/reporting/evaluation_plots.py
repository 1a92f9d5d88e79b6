"""The figures of an evaluation, drawn with matplotlib's objects alone: no pyplot, no window, no global state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

_IMAGE_SIDE = 160  # pixels, for 32 of the data


@dataclass(frozen=True)
class WrongImage:
    """A misclassified image."""

    image: Tensor  # uint8, (3, H, W), on the CPU
    truth: str  # name of its class
    prediction: str  # name of the class the network chose
    confidence: float  # softmax probability of that choice, from 0 to 1


def confusion_figure(confusion: Tensor, classes: Sequence[str], *, title: str) -> Figure:
    """Counts in cells, coloured by their share of the row.

    `confusion` is int64, (C, C), on the CPU; rows are the truth, columns the predictions of the C `classes`.
    """
    counts = confusion.numpy()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    num_classes = len(classes)
    side = 3.0 + 0.5 * num_classes
    figure = Figure(figsize=(side + 0.4, side - 0.6), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(num_classes), classes, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(num_classes), classes)
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    for (row, column), count in np.ndenumerate(counts):
        color = "white" if shares[row, column] > 0.5 else "black" if count else "silver"
        text = axes.text(column, row, f"{count}", ha="center", va="center", color=color, fontsize=9)
        text.set_in_layout(False)  # the layout does not need it, and a hundred texts would take half of the time
    figure.colorbar(image, ax=axes, fraction=0.046, label="share of the true class")
    return figure


def wrong_images_figure(wrong: Sequence[WrongImage], *, title: str) -> Figure:
    """A grid of images with their classes, in the given order; one line of text if there are none."""
    # Pixels and texts without axes: drawing one axes takes as long as all of these.
    columns = min(4, max(1, len(wrong)))
    width, height = max(600, 200 * columns), 80 + 230 * max(1, math.ceil(len(wrong) / columns))
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    figure.suptitle(title, y=1 - 20 / height, va="top")
    if not wrong:
        figure.text(0.5, 0.5, "none", ha="center", va="center")
    for position, item in enumerate(wrong):
        left, top = 20 + 200 * (position % columns), height - 140 - 230 * (position // columns)
        pixels = item.image.permute(1, 2, 0).numpy()
        scale = _IMAGE_SIDE // len(pixels)
        figure.figimage(pixels.repeat(scale, axis=0).repeat(scale, axis=1), left, top - _IMAGE_SIDE)
        label = f"is {item.truth}\ntaken for {item.prediction}\n{item.confidence:.1%} sure"
        middle = left + _IMAGE_SIDE / 2
        figure.text(middle / width, (top + 5) / height, label, ha="center", va="bottom", fontsize=9)
    return figure


def evaluation_figures(
    confusion: Tensor, wrong: Sequence[WrongImage], classes: Sequence[str], *, title: str
) -> dict[str, Figure]:
    """The figures of an evaluation by name, with counts below `title`; for the arguments see the functions above."""
    right, total = int(confusion.diagonal().sum()), int(confusion.sum())
    counted = f"{title}\n{right:,} of {total:,} right" + (f" ({right / total:.2%})" if total else "")
    listed = f"{title}\nthe {len(wrong)} most confident of {total - right:,} mistakes"
    return {
        "confusion": confusion_figure(confusion, classes, title=counted),
        "wrong": wrong_images_figure(wrong, title=listed),
    }


def render(figure: Figure) -> npt.NDArray[np.uint8]:
    """The figure's pixels, (H, W, 3)."""
    canvas: Any = FigureCanvasAgg(figure)  # matplotlib leaves it untyped
    canvas.draw()
    return np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[..., :3]
