"""The figures of an evaluation, drawn with matplotlib's objects alone: no pyplot, no window, no global state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

_IMAGE_SIDE = 160  # pixels of an image, however many it has
_MOST_NUMBERS = 30  # classes; in more, numbers and names would be too small to read, and take minutes
_LARGEST = 18  # classes; the figure of more is as large, or its pixels would grow with their square
_LONGEST = 16  # characters of a name


@dataclass(frozen=True)
class WrongImage:
    """A misclassified image."""

    image: Tensor  # uint8, (3, H, W), on the CPU
    truth: str  # name of its class
    prediction: str  # name of the class the network chose
    confidence: float  # softmax probability of that choice, from 0 to 1


def confusion_figure(confusion: Tensor, classes: Sequence[str], *, title: str) -> Figure:
    """Counts in cells, coloured by their share of the row; of very many classes no counts, and only some names.

    `confusion` is int64, (C, C), on the CPU; rows are the truth, columns the predictions of the C `classes`.
    """
    counts = confusion.numpy()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    num_classes = len(classes)
    side = 3.0 + 0.5 * min(num_classes, _LARGEST)
    figure = Figure(figsize=(side + 0.4, side - 0.6), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    # With square cells the layout would push the name of the axis over the edge.
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    named = range(0, num_classes, math.ceil(num_classes / _MOST_NUMBERS))
    names = [_shortened(classes[label]) for label in named]
    axes.set_xticks(named, names, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
    axes.set_yticks(named, names, parse_math=False)
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    for (row, column), count in np.ndenumerate(counts if num_classes <= _MOST_NUMBERS else counts[:0]):
        color = "white" if shares[row, column] > 0.5 else "black" if count else "silver"
        size = 9 if num_classes <= _LARGEST else 7
        text = axes.text(column, row, f"{count}", ha="center", va="center", color=color, fontsize=size)
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
        image = Image.fromarray(item.image.permute(1, 2, 0).numpy())
        # Of a larger image this takes means, of a smaller one it repeats pixels.
        pixels = np.asarray(image.resize((_IMAGE_SIDE, _IMAGE_SIDE), Image.Resampling.BOX))
        figure.figimage(pixels, left, top - _IMAGE_SIDE)
        truth, prediction = _shortened(item.truth), _shortened(item.prediction)
        label = f"is {truth}\ntaken for {prediction}\n{item.confidence:.1%} sure"
        middle = left + _IMAGE_SIDE / 2
        place = middle / width, (top + 5) / height
        figure.text(*place, label, ha="center", va="bottom", fontsize=9, parse_math=False)
    return figure


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}\N{HORIZONTAL ELLIPSIS}"


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
