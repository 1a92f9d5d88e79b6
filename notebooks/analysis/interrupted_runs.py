"""What a killed process costs a run: frames and figures of interrupted runs.

A run is observed from outside while it trains. Its own files do not say when it was interrupted: `metrics.csv` is cut
back to the checkpoint from which a resumed run continues.

A loop that is not of this package writes `steps_rank0.csv`, `steps_rank1.csv`, ... instead: a line when a process has
started and one after each optimizer step, with the columns start (0, 1, ...: how often the processes have been started
again), epoch, step (optimizer steps done, by the loop's own count), lr, loss and ids (of the samples, separated by
spaces). The first line of a start has no loss and no ids.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from analysis.run_frames import BLUE, GREY, RED, read_metrics, tidy
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.errors import ConfigError


def steps_in_metrics(run: str | Path) -> int:
    """Optimizer steps done, by the run's `metrics.csv`, which may be in use; 0 before the first one.

    Exact with `--trainer.log_every_n_steps=1`.
    """
    return _last_step(Path(run) / "metrics.csv", default=-1) + 1  # the file counts steps from 0


def steps_in_log(folder: str | Path) -> int:
    """Optimizer steps done, by `steps_rank0.csv`, which may be in use; 0 before the first one."""
    return _last_step(Path(folder) / "steps_rank0.csv", default=0)


def _last_step(path: Path, *, default: int) -> int:
    """The last `step` of the whole lines of a table."""
    try:
        whole_lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        return default
    steps = [row["step"] for row in csv.DictReader(whole_lines) if row.get("step")]
    return int(steps[-1]) if steps else default


class StepWatch:
    """Notes by the clock how far a run has come.

    Args:
        steps: Says how many optimizer steps the run has done.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps, self._began_at = steps, perf_counter()
        self._rows: list[tuple[float, int, str]] = []

    def look(self, event: str = "") -> int:
        """Note the number of steps done if it has changed, or if something happens now, and return it."""
        step = self._steps()
        if event or not self._rows or self._rows[-1][1] != step:
            self._rows.append((perf_counter() - self._began_at, step, event))
        return step

    @property
    def frame(self) -> pd.DataFrame:
        """Columns seconds (since the watch was made), step and event ("" for none)."""
        return pd.DataFrame(self._rows, columns=["seconds", "step", "event"])


def interruption(timeline: pd.DataFrame) -> "pd.Series[Any]":
    """What the frame of a `StepWatch` with one event says of the restart.

    Returns:
        killed_after_step, resumed_from_step, steps_repeated, and seconds_to_next_step from the event on.
    """
    steps = timeline["step"]
    event = timeline.index[timeline["event"] != ""][0]
    backward = timeline.index[(steps.diff() < 0) & (timeline.index > event)]
    restart = backward[0] if len(backward) else event  # it goes back unless it was killed just after it had saved
    killed, resumed = int(steps[:restart].max()), int(steps[restart:].min())
    seconds = timeline["seconds"][restart:][steps[restart:] > resumed].iloc[0] - timeline["seconds"][event]
    return pd.Series(
        {
            "killed_after_step": killed,
            "resumed_from_step": resumed,
            "steps_repeated": killed - resumed,
            "seconds_to_next_step": round(seconds, 1),
        },
        dtype=object,
    )


def largest_difference(run: str | Path, other: str | Path) -> float:
    """Between the numbers in the last checkpoints of two runs.

    These are weights, BatchNorm statistics, the states of optimizer and schedule, epoch and step. It is infinite where
    one run has a number that the other has not, or one that is not finite.
    """
    mine, theirs = (dict(_numbers(read_checkpoint(Path(each) / "checkpoints" / "last.ckpt"))) for each in (run, other))
    if {name: each.shape for name, each in mine.items()} != {name: each.shape for name, each in theirs.items()}:
        return math.inf
    differences = [float((mine[name] - theirs[name]).abs().max()) for name in mine if mine[name].numel()]
    return max(each if math.isfinite(each) else math.inf for each in differences)


_COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint has below `_COMPARED`, in double precision, by its place."""
    if isinstance(value, Tensor | float | int):
        yield name, torch.as_tensor(value, dtype=torch.float64)
    elif isinstance(value, Mapping):
        for key in value if name else _COMPARED:
            yield from _numbers(value[key], f"{name}/{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{name}/{index}")


def metrics_without_clock(run: str | Path) -> pd.DataFrame:
    """`read_metrics` without what depends on the speed of the machine."""
    metrics = read_metrics(run)
    return metrics.drop(columns=[name for name in metrics if str(name).endswith("per_s")])


def read_step_log(folder: str | Path) -> pd.DataFrame:
    """The optimizer steps of all ranks in the order in which they were computed, repeated ones too.

    Returns:
        Columns start, rank, epoch, step, lr, loss and ids (a list of ints), without the first lines of the starts.

    Raises:
        ConfigError: If the folder has no `steps_rank*.csv`.
    """
    paths = sorted(Path(folder).glob("steps_rank*.csv"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise ConfigError(f"no steps_rank*.csv in {folder}", remedy="run the loop that writes them into it")
    ranks = [pd.read_csv(path).assign(rank=rank) for rank, path in enumerate(paths)]
    frame = pd.concat(ranks).dropna(subset=["loss"]).reset_index(drop=True)
    return frame.assign(ids=frame["ids"].map(lambda ids: [int(i) for i in str(ids).split()]))


def learning_rates(run: str | Path) -> pd.DataFrame:
    """The learning rate of each logged step of a run folder: columns step, counted from 1, and lr."""
    metrics = read_metrics(run)
    name = next(str(name) for name in metrics.columns if str(name).startswith("lr-"))  # the optimizer's class follows
    frame = metrics.rename(columns={name: "lr"}).dropna(subset=["lr"])
    return frame.assign(step=frame["step"] + 1)[["step", "lr"]]


def uses_per_epoch(log: pd.DataFrame) -> "pd.Series[int]":
    """How many samples the steps of each epoch have read, repeated ones counted again; from `read_step_log`."""
    return log["ids"].map(len).groupby(log["epoch"]).sum().rename("samples read")


def plot_timelines(timelines: Mapping[str, pd.DataFrame]) -> Figure:
    """Optimizer steps done against time, a panel for each run, with a cross where a process was killed.

    Args:
        timelines: Frames of `StepWatch` with one event, by title.
    """
    figure = Figure(figsize=(4.8 * len(timelines), 3.8), layout="constrained")
    for axes, (title, frame) in zip(_panels(figure, len(timelines)), timelines.items(), strict=True):
        axes.step(frame["seconds"], frame["step"], where="post", color=BLUE, label="steps done")
        event, found = frame[frame["event"] != ""].iloc[0], interruption(frame)
        axes.plot(event["seconds"], event["step"], "x", color=RED, markersize=9, mew=2.2, label=event["event"])
        text = f"resumed from step {found['resumed_from_step']}:\n{found['steps_repeated']} steps again"
        axes.text(0.98, 0.05, text, transform=axes.transAxes, ha="right", fontsize=9)
        axes.set(title=title, xlabel="time since the start of torchrun (seconds)", xlim=(0, None), ylim=(0, None))
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.axes[0].set_ylabel("optimizer steps done")
    return figure


def plot_learning_rates(panels: Mapping[str, Mapping[str, pd.DataFrame]]) -> Figure:
    """The learning rate against the optimizer step, a panel for each trainer.

    Args:
        panels: By title, frames with the columns step and lr by label; the first of each panel is drawn wide and grey.
    """
    figure = Figure(figsize=(4.8 * len(panels), 3.4), layout="constrained")
    for axes, (title, runs) in zip(_panels(figure, len(panels)), panels.items(), strict=True):
        styles: list[dict[str, Any]] = [
            {"color": GREY, "linewidth": 6, "alpha": 0.4},
            {"color": BLUE},
            {"color": RED, "linestyle": "--"},
        ]
        for style, (label, frame) in zip(styles, runs.items(), strict=False):
            axes.plot(frame["step"], frame["lr"], label=label, **style)
        axes.set(title=title, xlabel="optimizer step", ylim=(0, None))
        axes.legend(frameon=False, fontsize=9)
    figure.axes[0].set_ylabel("learning rate")
    return figure


def _panels(figure: Figure, number: int) -> list[Axes]:
    found = list(figure.subplots(1, number, sharey=True, squeeze=False)[0])
    for axes in found:
        tidy(axes)
    return found
