"""Draw the README's figures from the recorded runs: `python benchmarks/figures.py [OUTPUT_DIR]`."""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from lit_cifar.analysis import BLUE, GREY, RED, read_metrics, read_per_rank

HERE = Path(__file__).parent
ARTICLES_RUN = HERE / "2026-11-20-articles-stem"
REAL_DATA = HERE / "2026-11-20-loss-curves" / "losses.json"
# The articles print the mean loss of epochs 0 to 5 of one process, and 74.79 to 76.04 % after 15.
PRINTED_LOSSES = [2.07, 1.46, 1.21, 0.99, 0.82, 0.55]
PRINTED_ACCURACIES = [0.7479, 0.7604]


def articles_run(folder: Path) -> Figure:
    """Our run of the articles' recipe beside the figures that they print."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    loss, acc = figure.subplots(1, 2)
    epochs = read_metrics(folder / "seed0" / "fit").dropna(subset=["train/loss"]).reset_index(drop=True)
    tested = read_per_rank(folder / "seed0" / "test", split="test").set_index("rank")["accuracy"]["all"]
    style = {"marker": "o", "markersize": 3, "color": BLUE}
    loss.plot(epochs.index + 1, epochs["train/loss"], label="lit_cifar", **style)
    acc.plot(epochs.index + 1, epochs["train/acc"], label="training", **style)
    acc.axhline(tested, color=BLUE, linestyle="--", label=f"test after 15 epochs: {tested:.2%}")
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


def loss_curves(record: Path) -> Figure:
    """Every mode's loss beside that of the one device that it equals, and how far apart the two are."""
    content = json.loads(record.read_text())
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    steps = range(1, content["steps"] + 1)
    for index, row in enumerate(content["rows"]):
        style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--", "label": row["mode"]}
        losses.plot(steps, row["losses"], linewidth=1.2, **style)
        losses.plot(steps, row["expected_losses"], ".", color=GREY, markersize=5, zorder=0)
        gap = [abs(a - b) for a, b in zip(row["losses"], row["expected_losses"], strict=True)]
        gaps.plot(steps, [max(value, 1e-8) for value in gap], linewidth=1.2, **style)
    losses.plot([], [], ".", color=GREY, label="one device")
    losses.set(title="loss of the global batch")
    gaps.set(title="difference from the one device that it equals", yscale="log", ylim=(8e-9, None))
    for axes in (losses, gaps):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure


def main(output: Path) -> None:
    """Write every figure into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    articles_run(ARTICLES_RUN).savefig(output / "articles_run.png", dpi=120)
    loss_curves(REAL_DATA).savefig(output / "loss_curves.png", dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "docs" / "figures")
