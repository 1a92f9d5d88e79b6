"""Timelines of stages as pandas frames and figures: work over time, idle share, and what is kept for backward."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.run_frames import file_of
from analysis.timeline import FILE
from lit_cifar.models.partition import Partition

COLORS = {"forward": "#1f6fb4", "backward": "#d9822b"}
UNIT_COSTS = {"forward": 1.0, "backward": 2.0}


def read_timeline(run: str | Path) -> pd.DataFrame:
    """The spans of `timeline.json` in a run folder.

    Returns:
        Columns step, rank, worker, stage, microbatch, kind, start_ms, end_ms (from the start of the step), saved_mib.

    Raises:
        ConfigError: If the folder has no such file.
    """
    timeline = "--trainer.callbacks+=analysis.timeline.Timeline"
    path = file_of(run, FILE, remedy=f"python -m lit_cifar fit --trainer.strategy=pp {timeline} writes one")
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    frame = pd.DataFrame([span["args"] | {"start_ms": span["ts"] / 1e3, "ms": span["dur"] / 1e3} for span in spans])
    frame["start_ms"] -= frame.groupby("step")["start_ms"].transform("min")
    frame["end_ms"] = frame["start_ms"] + frame["ms"]
    frame["saved_mib"] = frame["saved_bytes"] / 2**20
    columns = ["step", "rank", "worker", "stage", "microbatch", "kind", "start_ms", "end_ms", "saved_mib"]
    return frame[columns].sort_values(["step", "start_ms"], ignore_index=True)


def bubbles(timeline: pd.DataFrame) -> pd.DataFrame:
    """The time of each step and the share of it in which workers are idle.

    The time of a step is the longest time of any worker from its first span to its last, as in Qi et al., Zero
    bubble pipeline parallelism, 2024.

    Returns:
        Indexed by step, columns time_ms and bubble (0 to 1).
    """
    rows = {}
    for step, frame in timeline.groupby("step"):
        windows = frame.groupby("worker").agg(first=("start_ms", "min"), last=("end_ms", "max"))
        time_ms = float((windows["last"] - windows["first"]).max())
        busy_ms = float((frame["end_ms"] - frame["start_ms"]).sum())
        rows[step] = {"time_ms": time_ms, "bubble": 1 - busy_ms / (time_ms * len(windows))}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")


def fastest_step(timeline: pd.DataFrame) -> pd.DataFrame:
    """The spans of the fastest step: the one that other programs disturbed least."""
    return timeline[timeline["step"] == bubbles(timeline)["time_ms"].idxmin()].reset_index(drop=True)


def replay(step: pd.DataFrame, *, forward: float = 1.0) -> pd.DataFrame:
    """The same work in the same order, if messages took no time and all workers worked at the same time.

    Args:
        step: The spans of one step.
        forward: The duration of a forward. A backward takes twice as long.

    Returns:
        The frame with other times.
    """
    queues = {worker: list(frame.sort_values("start_ms").index) for worker, frame in step.groupby("worker")}
    names = {index: (str(row["kind"]), int(row["stage"]), int(row["microbatch"])) for index, row in step.iterrows()}
    ends: dict[tuple[str, int, int], float] = {}
    free = dict.fromkeys(queues, 0.0)
    times: dict[Any, tuple[float, float]] = {}
    while any(queues.values()):
        ready = [worker for worker, queue in queues.items() if queue and _needs(names[queue[0]], names) <= set(ends)]
        assert ready, "a schedule that waits for itself"
        for worker in ready:
            index = queues[worker].pop(0)
            kind = str(step["kind"][index])
            cost = forward * UNIT_COSTS[kind]
            start = max([free[worker], *(ends[need] for need in _needs(names[index], names))])
            free[worker] = ends[names[index]] = start + cost
            times[index] = (start, start + cost)
    started = pd.Series({index: start for index, (start, _) in times.items()})
    ended = pd.Series({index: end for index, (_, end) in times.items()})
    return step.assign(start_ms=started, end_ms=ended)


def _needs(name: tuple[str, int, int], names: Mapping[Any, tuple[str, int, int]]) -> set[tuple[str, int, int]]:
    """What must have ended before: a message from a neighbouring stage, or an earlier pass of the same stage."""
    kind, stage, microbatch = name
    needed = {
        "forward": {("forward", stage - 1, microbatch)},
        "backward": {("backward", stage + 1, microbatch), ("forward", stage, microbatch)},
    }[kind]
    return needed & set(names.values())


def bubble_formula(schedule: str, *, num_workers: int, num_microbatches: int) -> float:
    """The share of a step in which workers are idle, if stages take equally long and messages take no time.

    Sources: GPipe: Huang et al. 2019; 1F1B: Narayanan et al. 2019; Interleaved1F1B, two stages for each worker:
    Narayanan et al. 2021, section 2.2. One microbatch makes GPipe the naive order.
    """
    stages_per_worker = 2 if schedule == "Interleaved1F1B" else 1
    return (num_workers - 1) / (stages_per_worker * num_microbatches + num_workers - 1)


def stored_mib(timeline: pd.DataFrame) -> pd.Series:
    """The most that each worker keeps for backward at any time, in MiB, parameters not counted.

    A forward's tensors count from its start to the end of the last backward of the same stage and microbatch.
    """
    keys = ["step", "worker", "stage", "microbatch"]
    kept = timeline[timeline["kind"] == "forward"].set_index(keys)
    kept = kept.assign(freed_ms=timeline[timeline["kind"] != "forward"].groupby(keys)["end_ms"].max())
    peaks = {}
    for (step, worker), frame in kept.groupby(["step", "worker"]):
        moments = [
            frame["saved_mib"][(frame["start_ms"] <= t) & (t < frame["freed_ms"])].sum() for t in frame["start_ms"]
        ]
        peaks[step, worker] = max(moments)
    return pd.Series(peaks).groupby(level=1).max().rename("stored_mib").rename_axis("worker")


def plot_timelines(timelines: Mapping[str, pd.DataFrame], *, unit: str = "ms") -> Figure:
    """A panel for each timeline, a row for each worker, a bar for each span with the number of its microbatch.

    Args:
        timelines: Spans of one step by title.
        unit: Of the times, on the axis.
    """
    rows = [frame["worker"].nunique() for frame in timelines.values()]
    figure = Figure(figsize=(9, 0.9 + sum(0.65 + 0.32 * row for row in rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=[row + 0.6 for row in rows])[:, 0]
    last = max(float(frame["end_ms"].max()) for frame in timelines.values())
    for axes, (title, frame) in zip(panels, timelines.items(), strict=True):
        _draw_timeline(axes, frame, min_width=last / 60)
        axes.set_title(title, fontsize=10, loc="left")
    panels[-1].set_xlim(-last / 200, last * 1.005)
    panels[-1].set_xlabel(f"time since the start of the step ({unit})")
    kinds = set().union(*(frame["kind"] for frame in timelines.values()))
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_timeline(axes: Axes, frame: pd.DataFrame, *, min_width: float) -> None:
    workers = sorted(frame["worker"].unique())
    for _, span in frame.iterrows():
        y, start, width = workers.index(span["worker"]), span["start_ms"], span["end_ms"] - span["start_ms"]
        color = COLORS[span["kind"]] if span["stage"] < len(workers) else _lighter(COLORS[span["kind"]])
        axes.barh(y, width, left=start, height=0.8, color=color, edgecolor="white", linewidth=0.5)
        if width >= min_width:
            axes.text(start + width / 2, y, span["microbatch"], ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks(range(len(workers)), workers)
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _lighter(color: str) -> tuple[float, ...]:
    return tuple(0.6 * value + 0.4 for value in to_rgb(color))


def partition_frame(partition: Partition) -> pd.DataFrame:
    """A row for each block: stage, block, mflop (forward pass of one image), parameters, sends_kib (float32)."""
    rows = [
        {
            "stage": index,
            "block": block.name,
            "mflop": block.flop / 1e6,
            "parameters": block.num_parameters,
            "sends_kib": 4 * prod(block.output_shape) / 1024,
        }
        for index, stage in enumerate(partition.stages)
        for block in stage
    ]
    return pd.DataFrame(rows)


def plot_partition(blocks: pd.DataFrame) -> Figure:
    """Two panels over the blocks of `partition_frame`, a color for each stage: work, and parameters."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    palette = ["#1f6fb4", "#d9822b", "#6a994e", "#8e6c8a"]
    for axes, (column, label, scale) in zip(
        figure.subplots(1, 2),
        [("mflop", "forward pass (MFLOP per image)", 1), ("parameters", "parameters (millions)", 1e6)],
        strict=True,
    ):
        for stage in range(int(blocks["stage"].max()) + 1):
            frame = blocks[blocks["stage"] == stage]
            share = frame[column].sum() / blocks[column].sum()
            axes.bar(frame.index, frame[column] / scale, color=palette[stage % 4], label=f"stage {stage}: {share:.0%}")
        axes.set_xticks(range(len(blocks)), blocks["block"].tolist(), rotation=90, fontsize=7)
        axes.set_ylabel(label)
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
