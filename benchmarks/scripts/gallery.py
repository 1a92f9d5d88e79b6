"""What a user sees of each planted mistake in the curves of a training, from the recorded losses."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import notebooks_path  # noqa: F401  # for `analysis`
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.run_frames import RED

EPOCHS = 3  # of each recorded run
T_95 = 2.776  # 97.5 % quantile of Student's t with 4 degrees of freedom: there are five seeds
VISIBLE = {
    "duplicated-shard": "all read the\nsame images",
    "copied-stage": "an untrained\ncopy computes",
    "skipped-update": "one process\ndoes not step",
    "other-weights": "one evaluates\nother weights",
}
HIDDEN = {
    "no-all-reduce": "gradients are\nnot averaged",
    "lost-momentum": "momentum is\nlost on one",
    "local-norm": "each stage\nclips by itself",
    "stale-shard": "a shard is\nnot updated",
}

Curves = dict[str, list[float]]  # the training loss of every step, and the validation loss of every epoch


def final(found: Curves) -> dict[str, float]:
    """Training loss, a mean over the last epoch, and the last validation loss."""
    steps = found["train/loss_step"]
    return {"training": statistics.fmean(steps[-len(steps) // EPOCHS :]), "validation": found["val/loss"][-1]}


def spread(of_seeds: list[Curves]) -> dict[str, float]:
    """By less than this two runs differ that differ in their seed alone, in 95 of 100 cases."""
    of_all = [final(found) for found in of_seeds]
    return {key: T_95 * math.sqrt(2) * statistics.stdev(found[key] for found in of_all) for key in of_all[0]}


def is_seen(row: dict[str, Any], noise: dict[str, float]) -> bool:
    """Whether a curve differs from the one without the mistake by more than another seed's would."""
    if row["with"] is None:
        return True
    wrong, right = final(row["with"]), final(row["without"])
    return any(not abs(wrong[key] - right[key]) <= noise[key] for key in right)


def smooth(losses: list[float], width: int = 10) -> list[float]:
    """The mean of each step and those before it, `width` at most; nan and inf stay where they are."""
    return [statistics.fmean(losses[max(0, i + 1 - width) : i + 1]) for i in range(len(losses))]


def drawn(path: Path) -> Figure:
    """Four mistakes that the curves show, or that end the run, and four that they do not show."""
    record = json.loads(path.read_text())
    noise, rows = spread(record["of_seeds"]), {row["mutation"]: row for row in record["rows"]}
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    hidden = sum(not is_seen(row, noise) for row in rows.values())
    titles = {
        f"{len(rows) - hidden} of {len(rows)} mistakes change the curves, or end the run": (upper, VISIBLE),
        f"{hidden} of {len(rows)} do not, beyond what another seed does; four of them": (lower, HIDDEN),
    }
    for title, (half, names) in titles.items():
        half.suptitle(title, fontsize=11, fontweight="bold")
        for panel, (name, words) in zip(half.subplots(1, 4, sharey=True), names.items(), strict=True):
            _draw(panel, rows[name], f"{words}\n({rows[name]['mode']})")
        half.supxlabel("optimizer step", fontsize=10)
    figure.axes[0].set_ylabel("training loss", fontsize=10)
    figure.axes[4].set_ylabel("training loss", fontsize=10)
    return figure


def _draw(panel: Axes, row: dict[str, Any], title: str) -> None:
    panel.plot(smooth(row["without"]["train/loss_step"]), color="0.7", linewidth=3)
    if row["with"] is None:
        panel.text(60, 2.6, "the run\nis stopped", color=RED, ha="center", va="center", fontsize=10)
    else:
        panel.plot(smooth(row["with"]["train/loss_step"]), color=RED, linewidth=1.4)
        if (more := row["with"]["val/loss"][-1] - row["without"]["val/loss"][-1]) > 1:
            panel.text(60, 2.6, f"validation\nloss {more:+.0f}", color=RED, ha="center", va="center", fontsize=10)
    panel.set_title(title, fontsize=9)
    panel.set_ylim(1.4, 2.8)
    panel.set_xticks([0, 100])
    panel.tick_params(labelsize=9)
    panel.spines[["top", "right"]].set_visible(False)
