"""Speed, memory and time to an accuracy by mode and number of devices, read from run folders."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.memory import FILES
from analysis.run_frames import BLUE, GREY, read_metrics, tidy
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.progress import METRIC as SPEED
from lit_cifar.reporting.run_folder import read_config

MIB = 2**20
Kind = tuple[str, int]  # mode and number of devices
_COLORS = (BLUE, "#d98c1f", "#3a8f5c", "#7d5ba6", "#c8321e", GREY)


def read_speed(run: str | Path) -> float:
    """Images per second of training, the median of the logged windows.

    Raises:
        ConfigError: The run has logged none.
    """
    metrics = read_metrics(run)
    if SPEED not in metrics:
        raise ConfigError(
            f"{run} has logged no {SPEED}: it was shorter than a window",
            remedy="train longer, or pass a smaller --trainer.log_every_n_steps",
        )
    return float(metrics[SPEED].median())


def read_memory(run: str | Path) -> pd.DataFrame:
    """What `TrainingMemory` wrote: a row for each process with columns state_mib, gpu_peak_mib and resident_peak_mib.

    What a machine does not have, as the peak of a GPU, is nan.

    Raises:
        ConfigError: It was not among the callbacks.
    """
    files = sorted(Path(run).glob(FILES))
    if not files:
        raise ConfigError(
            f"no {FILES} in the run folder {run}",
            remedy="add --trainer.callbacks+=analysis.memory.TrainingMemory to the fit",
        )
    frame = pd.DataFrame([json.loads(file.read_text()) for file in files]).set_index("rank").sort_index().astype(float)
    return (frame / MIB).rename(columns=lambda name: name.replace("_bytes", "_mib"))


def scaling_frame(runs: Mapping[Kind, Sequence[str | Path]], *, reference: Kind = ("single", 1)) -> pd.DataFrame:
    """A row for each mode and number of devices.

    A run is compared with the run of the reference in the same round, because a machine that is shared may be faster in
    one round than in the next.

    Args:
        runs: Run folders by mode and number of devices, one for each round, in the order of the rounds.
        reference: Which of them the others are compared with.

    Returns:
        Columns mode, devices, repeats, images_per_s (median over the rounds), slowest, fastest, speedup (median over
        the rounds), lowest, highest (speed-up in a round), efficiency (speed-up for each device), state_mib and
        gpu_peak_mib (of the process with the most).

    Raises:
        ConfigError: Some were run in more rounds than others.
    """
    if len(set(map(len, runs.values()))) > 1:
        raise ConfigError(
            f"not equally many runs of each kind: { {kind: len(folders) for kind, folders in runs.items()} }",
            remedy="run each kind once in every round",
        )
    speeds = pd.DataFrame({kind: [read_speed(folder) for folder in folders] for kind, folders in runs.items()})
    rows = []
    for (mode, devices), folders in runs.items():
        speed, memory = speeds[mode, devices], read_memory(folders[0])
        speedup = speed / speeds[reference]
        rows.append(
            {"mode": mode, "devices": devices, "repeats": len(speed)}
            | {"images_per_s": speed.median(), "slowest": speed.min(), "fastest": speed.max()}
            | {"speedup": speedup.median(), "lowest": speedup.min(), "highest": speedup.max()}
            | {"efficiency": speedup.median() / devices}
            | {name: memory[name].max() for name in ("state_mib", "gpu_peak_mib")}
        )
    return pd.DataFrame(rows)


def accuracy_over_time(run: str | Path) -> pd.DataFrame:
    """Validation accuracy after every epoch, and the seconds of training until then.

    The seconds follow from the logged images per second. Validation, checkpoints and the start of the run are left out,
    as of `lit_cifar.reporting.progress`.

    Returns:
        Columns step, seconds and accuracy.
    """
    metrics = read_metrics(run)
    read_speed(run)  # refuses a run without
    batch_size = read_config(Path(run))["data"]["batch_size"]
    speed = metrics[SPEED].bfill().ffill()  # a window is logged at its last step
    steps = metrics["step"].diff().fillna(metrics["step"].iloc[0] + 1)  # steps are counted from 0
    frame = metrics.assign(seconds=(steps * batch_size / speed).cumsum(), accuracy=metrics["val/acc"])
    return frame.dropna(subset=["accuracy"])[["step", "seconds", "accuracy"]].reset_index(drop=True)


def time_to(frame: pd.DataFrame, accuracy: float) -> dict[str, float]:
    """The optimizer steps and seconds of training until a validation has reached `accuracy`; nan if none did.

    Args:
        frame: From `accuracy_over_time`.
        accuracy: From 0 to 1.
    """
    reached = frame[frame["accuracy"] >= accuracy]
    if reached.empty:
        return {"steps": math.nan, "seconds": math.nan}
    return {"steps": float(reached["step"].iloc[0]) + 1, "seconds": float(reached["seconds"].iloc[0])}


def plot_scaling(frame: pd.DataFrame) -> Figure:
    """Images per second and speed-up, with their ranges, and memory of a process, by mode and number of devices.

    Args:
        frame: From `scaling_frame`.
    """
    labels = [f"{mode}, {devices}" for mode, devices in zip(frame["mode"], frame["devices"], strict=True)]
    figure = Figure(figsize=(9, 1.3 + 0.34 * len(labels)), layout="constrained")
    speed, speedup, memory = figure.subplots(1, 3, sharey=True)
    _draw_ranges(speed, frame[["images_per_s", "slowest", "fastest"]])
    speed.set(xlabel="images/s: median, range", ylabel="mode, devices")
    _draw_ranges(speedup, frame[["speedup", "lowest", "highest"]])
    speedup.axvline(1, color=GREY, linestyle="--", linewidth=1)
    speedup.set_xlabel("speed-up: median, range")
    has_gpu = frame["gpu_peak_mib"].notna().all()
    memory.barh(
        range(len(labels)), frame["gpu_peak_mib" if has_gpu else "state_mib"].to_numpy(), color=GREY, alpha=0.85
    )
    memory.set_xlabel("peak of a GPU, MiB" if has_gpu else "weights, gradients, optimizer\nstate of a process, MiB")
    speed.set_yticks(range(len(labels)), labels)
    speed.invert_yaxis()
    for axes in (speed, speedup, memory):
        tidy(axes, grid="x")
    return figure


def _draw_ranges(axes: Axes, frame: pd.DataFrame) -> None:
    """Bars of the first column, with a line from the second to the third."""
    middle, low, high = frame.to_numpy().T
    axes.barh(
        range(len(frame)), middle, xerr=[middle - low, high - middle], color=BLUE, alpha=0.85, ecolor=GREY, capsize=3
    )


def plot_accuracy_over_time(runs: Mapping[str, pd.DataFrame], *, target: float | None = None) -> Figure:
    """Validation accuracy over epochs' ends, once over the optimizer steps and once over the seconds of training.

    Args:
        runs: Frames of `accuracy_over_time` by label.
        target: An accuracy to mark.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, column, xlabel in zip(panels, ("step", "seconds"), ("optimizer step", "training time in s"), strict=True):
        for (label, frame), color in zip(runs.items(), _COLORS * len(runs), strict=False):
            axes.plot(frame[column], 100 * frame["accuracy"], marker=".", color=color, label=label)
        if target is not None:
            axes.axhline(100 * target, color=GREY, linestyle="--", linewidth=1)
        axes.set_xlabel(xlabel)
        tidy(axes)
    panels[0].set_ylabel("validation accuracy in %")
    panels[1].legend(frameon=False, fontsize=8, loc="lower right")
    return figure
