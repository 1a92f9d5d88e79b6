"""Draw the figures of README and docs from the recorded runs: `python benchmarks/scripts/figures.py [OUTPUT_DIR]`."""

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diagrams
import gallery
import notebooks_path  # noqa: F401  # for `analysis`
from matplotlib.figure import Figure

from analysis.articles import PRINTED_LOSSES
from analysis.run_frames import BLUE, GREY, RED, read_metrics, read_per_rank

HERE = Path(__file__).parents[1]
ARTICLES_RUN = HERE / "articles" / "2026-11-20"
VARIANTS = [  # of their recipe
    HERE / "articles" / run
    for run in (
        "2026-11-23-plain-momentum/seed0",
        "2026-11-20-torchvision-stem/seed0",
        "2026-11-20-torchvision-stem/seed1",
    )
]
GALLERY = HERE / "mistakes" / "2026-11-22-gallery" / "gallery.json"
REAL_DATA = HERE / "modes" / "2026-11-21-steps" / "losses.json"
VERIFIED = HERE / "verify" / "2026-11-20" / "devices4_float64.json"
PLANTED = HERE / "mistakes" / "2026-11-22-self-test" / "self_test.json"
PRINTED_ACCURACIES = [0.7479, 0.7604]  # of the articles' single process, after 15 epochs
STOCK = HERE / "stock-lightning" / "2026-11-24" / "stock.json"
SAME_BITS = 1e-17  # where a difference of 0 is drawn on a logarithmic axis
BOUND = 1e-9  # what `verify` allows in float64
SMALLEST_MISTAKES = {
    "other-decay": "one rank has no weight decay",
    "dropped-microbatch": "a microbatch without gradients",
    "local-norm": "each stage clips by its own norm",
    "lone-pipelines": "pipelines not averaged",
    "other-decay-of-part": "one rank has no weight decay",
}


def articles_run(folder: Path) -> Figure:
    """Our run of the articles' recipe beside the figures that they print."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    loss, acc = figure.subplots(1, 2)
    epochs = read_metrics(folder / "seed0" / "fit").dropna(subset=["train/loss"]).reset_index(drop=True)
    tested, *of_variants = (tested_accuracy(run) for run in (folder / "seed0", *VARIANTS))
    worst = min(of_variants)
    style = {"marker": "o", "markersize": 3, "color": BLUE}
    loss.plot(epochs.index + 1, epochs["train/loss"], label="lit_cifar", **style)
    acc.plot(epochs.index + 1, epochs["train/acc"], label="training", **style)
    acc.axhline(tested, color=BLUE, linestyle="--", label=f"its test after 15 epochs: {tested:.2%}")
    acc.axhline(worst, color=BLUE, linestyle=":", label=f"worst of four runs of variants: {worst:.2%}")
    loss.plot(range(1, 7), PRINTED_LOSSES, "x", color=RED, label="printed in the articles")
    acc.axhspan(*PRINTED_ACCURACIES, color=RED, alpha=0.3, label="test in the articles: 74.79 to 76.04%")
    loss.set(title="training loss", ylim=(0, None))
    acc.set(title="accuracy", ylim=(0, 1))
    acc.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for axes in (loss, acc):
        for drop in (5, 10):
            axes.axvline(drop + 0.5, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_xlabel("epoch (dotted: learning rate divided by 10)")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def tested_accuracy(run: Path) -> float:
    """Of all ranks together."""
    accuracy: float = read_per_rank(run / "test", split="test").set_index("rank")["accuracy"]["all"]
    return accuracy


def loss_curves(record: Path) -> Figure:
    """How far the loss of every mode is from that of the one device that it equals."""
    content = json.loads(record.read_text())
    alike: dict[tuple[float, ...], list[str]] = {}  # the modes whose losses differ by the same
    for row in content["rows"]:
        gap = (abs(a - b) for a, b in zip(row["losses"], row["expected_losses"], strict=True))
        alike.setdefault(tuple(gap), []).append(row["mode"])
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    steps = range(1, content["steps"] + 1)
    for gap, names in sorted(alike.items(), key=lambda item: -item[0][-1]):
        axes.plot(steps, [max(value, SAME_BITS) for value in gap], linewidth=2.2, label="\n".join(names))
    axes.axhline(1, color=GREY, linestyle=":")
    losses = [loss for row in content["rows"] for loss in row["losses"]]
    axes.annotate(
        f"the loss itself: {min(losses):.1f} to {max(losses):.1f}",
        (1, 1),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=10,
    )
    axes.set(xlabel="step", ylabel="difference of the loss\nfrom one device", yscale="log", ylim=(SAME_BITS / 2, 30))
    axes.set_yticks([SAME_BITS, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1], ["0", *(f"1e-{e}" for e in (15, 12, 9, 6, 3)), "1"])
    axes.set_xticks([1, 5, 10, 15, 20])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=10)
    return figure


def default_run(folder: Path) -> Figure:
    """Loss and accuracy of the default recipe over its epochs, and its accuracy on the test images."""
    record = json.loads((folder / "default.json").read_text())
    epochs = read_metrics(folder).dropna(subset=["train/loss"]).reset_index(drop=True)
    figure = Figure(figsize=(6.4, 3), layout="constrained")
    loss, acc = figure.subplots(1, 2)
    for axes, key, scale in ((loss, "loss", 1), (acc, "acc", 100)):
        for split, color, label in (("train", GREY, "training images"), ("val", BLUE, "held-out images")):
            style = {"marker": "o", "markersize": 3.5, "linewidth": 2, "color": color, "label": label}
            axes.plot(epochs.index + 1, scale * epochs[f"{split}/{key}"], **style)
        axes.set_xlabel("epoch", fontsize=11)
        axes.set_xticks([1, *range(5, len(epochs) + 1, 5)])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    (tested,) = record["rows"]
    accuracy = 100 * tested["correct"] / tested["total"]
    acc.plot([len(epochs)], [accuracy], "*", color=RED, markersize=13, label=f"test images: {accuracy:.2f} %")
    loss.set_title("loss", fontsize=12)
    loss.set_ylim(0, None)
    acc.set_title("accuracy in %", fontsize=12)
    acc.set_ylim(30, 100)
    acc.legend(frameon=False, fontsize=10, loc="lower right")
    return figure


def mistakes(record: Path) -> dict[str, dict[str, float]]:
    """For each mode the planted mistakes of which the record has a size, and the size."""
    found: dict[str, dict[str, float]] = {}
    for finding in json.loads(record.read_text())["findings"]:
        sizes = re.findall(r"differs by (\S+),", " ".join(finding["problems"]))
        if sizes:
            found.setdefault(finding["mode"], {})[finding["mutation"]] = float(sizes[0])
    return found


def proof(verified: Path, planted: Path = PLANTED) -> Figure:
    """How far every mode is from its one device, and how far the same mode is with a planted mistake."""
    sizes, rows = mistakes(planted), json.loads(verified.read_text())["rows"]
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        right, wrong = max(row["differences"].values()), sizes[row["mode"]]
        names = ("ResNet34", "a small ResNet with a planted mistake") if y == 0 else (None, None)
        axes.plot([max(right, SAME_BITS)], [y], "o", color=BLUE, markersize=8, label=names[0])
        axes.plot(list(wrong.values()), [y] * len(wrong), "x", color=RED, markersize=7, mew=1.8, label=names[1])
        if (mutation := min(wrong, key=wrong.__getitem__)) in SMALLEST_MISTAKES:
            beside = {"xytext": (-7, 0), "textcoords": "offset points", "ha": "right", "va": "center", "fontsize": 9}
            over = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the line of the bound
            axes.annotate(SMALLEST_MISTAKES[mutation], (wrong[mutation], y), **beside, bbox=over)
    axes.axvline(BOUND, color=GREY, linestyle="--", label="allowed: 1e-9")
    axes.set(
        xscale="log",
        xlim=(SAME_BITS / 3, 2),
        ylim=(len(rows) - 0.4, -0.6),
        xlabel="largest difference from one device, float64",
    )
    ticks = ("1e-15", "1e-12", "1e-9", "1e-6", "1e-3", "1")
    axes.set_xticks([SAME_BITS, *map(float, ticks)], ["0", *ticks])
    axes.set_yticks(range(len(rows)), [row["mode"] for row in rows], fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def stock_lightning(record: Path) -> Figure:
    """Losses of stock Lightning on 1 and 4 processes and with another seed, and their differences; those of `fit`."""
    rows = json.loads(record.read_text())["rows"]
    losses = {(row["program"], row["processes"], row["seed"]): row["losses"] for row in rows}
    cases = [
        ("stock", 4, 0, RED, "Lightning's ddp: 4 processes"),
        ("stock", 1, 1, "#e8912d", "1 process, another seed"),
        ("lit_cifar", 4, 0, BLUE, "lit_cifar's ddp: 4 processes"),
    ]
    figure = Figure(figsize=(6.4, 5), layout="constrained")
    panel, gaps = figure.subplots(2, 1, sharex=True)
    steps = range(1, 101)
    panel.plot(steps, gallery.smooth(losses["stock", 1, 0]), color="0.72", linewidth=5, label="Lightning: 1 process")
    for program, processes, seed, color, label in cases:
        if program == "stock":
            panel.plot(steps, gallery.smooth(losses[program, processes, seed]), color=color, linewidth=2)
        pairs = zip(losses[program, processes, seed], losses[program, 1, 0], strict=True)
        gap = [max(abs(a - b), SAME_BITS) for a, b in pairs]
        gaps.plot(steps, gap, color=color, linewidth=1.6, label=label)
    panel.set_title("A small network with GroupNorm, global batch 128, float64", fontsize=11)
    panel.set_ylabel("training loss,\nmean over 10 steps")
    gaps.set(xlabel="optimizer step", ylabel="difference from 1 process\nin each step", yscale="log", ylim=(5e-18, 3))
    gaps.set_yticks([SAME_BITS, 1e-15, 1e-10, 1e-5, 1], ["0", "1e-15", "1e-10", "1e-5", "1"])
    for axes in (panel, gaps):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return figure


def farthest(curves: dict[int, list[float]]) -> float:
    """The largest difference of a step's loss from that of one process."""
    return max(abs(a - b) for losses in curves.values() for a, b in zip(losses, curves[1], strict=True))


FIGURES: dict[str, tuple[Callable[[Any], Figure], Any]] = {
    "modes": (diagrams.modes, None),
    "two_bugs": (diagrams.two_bugs, HERE / "mistakes" / "2026-11-28-two-bugs"),
    "stock_lightning": (stock_lightning, STOCK),
    "proof": (proof, VERIFIED),
    "loss_curves": (loss_curves, REAL_DATA),
    "default_run": (default_run, HERE / "recipes" / "2026-11-30-default-cpu"),
    "articles_run": (articles_run, ARTICLES_RUN),
    "gallery": (gallery.drawn, GALLERY),
}


def content(figure: Figure) -> Iterator[Any]:
    """The data, texts and styles that a figure shows; fonts and releases of Matplotlib do not change them."""
    for axes in figure.axes:
        yield axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()
        for line in axes.lines:
            yield line.get_label(), line.get_color(), line.get_linestyle(), line.get_linewidth(), line.get_marker()
            yield line.get_xydata().tolist()
        for patch in axes.patches:
            yield patch.get_label(), patch.get_facecolor(), patch.get_bbox().bounds
        for text in axes.texts:
            yield text.get_text(), text.get_position()


def digest(figure: Figure) -> str:
    """SHA-256 of `content`, which each file keeps: so a test can tell a picture of an older record."""
    return hashlib.sha256(repr(list(content(figure))).encode()).hexdigest()


def save(figure: Figure, path: Path) -> None:
    """Write a PNG that says what it shows."""
    figure.savefig(path, dpi=160, metadata={"Content": digest(figure)})


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    parser = argparse.ArgumentParser(description="Draw the figures of README and docs.")
    parser.add_argument("output", nargs="?", type=Path, default=HERE.parent / "docs" / "figures", help="folder")
    return parser


def main(output: Path) -> None:
    """Write every figure into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    for name, (draw, record) in FIGURES.items():
        save(draw(record), output / f"{name}.png")


if __name__ == "__main__":
    main(parser().parse_args().output)
