"""What a user sees of each planted mistake in the curves of a training, from the recorded losses."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import notebooks_path  # noqa: F401  # for `analysis`
from matplotlib.figure import Figure

from analysis.run_frames import RED

EPOCHS = 3  # of each recorded run
T_95 = 2.776  # 97.5 % quantile of Student's t with 4 degrees of freedom: there are five seeds
COLUMNS = 8

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
    """A panel for each mistake: the training loss without it and with it."""
    record = json.loads(path.read_text())
    noise, rows = spread(record["of_seeds"]), record["rows"]
    figure = Figure(figsize=(13, 1.55 * math.ceil(len(rows) / COLUMNS)), layout="constrained")
    panels = figure.subplots(math.ceil(len(rows) / COLUMNS), COLUMNS, sharex=True, sharey=True).flat
    for panel, row in zip(panels, rows, strict=False):
        panel.plot(smooth(row["without"]["train/loss_step"]), color="0.7", linewidth=3)
        if row["with"] is not None:
            panel.plot(smooth(row["with"]["train/loss_step"]), color=RED, linewidth=1)
        is_hidden = not is_seen(row, noise)
        panel.set_title(f"{row['mutation']}\n{row['mode']}", fontsize=8, color="black" if is_hidden else RED)
        panel.set_ylim(1.4, 2.8)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(figure.axes)[len(rows) :]:
        panel.set_axis_off()
    figure.supxlabel("optimizer step", fontsize=9)
    figure.supylabel("training loss of rank 0, mean over 10 steps", fontsize=9)
    return figure
