"""The forecast as a picture: seconds of a step and efficiency over the number of devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_cifar.bench.forecast.prediction import Prediction

# Of each mode; `ddp_spawn` has the line of `ddp`.
_LINES = {
    "dp": ("#7d5ba6", "v"),
    "ddp": ("#2f6db5", "o"),
    "mp": ("#777777", "x"),
    "ddp_mp": ("#8c564b", "P"),
    "pp": ("#d98c1f", "s"),
    "ddp_pp": ("#c8321e", "D"),
    "fsdp2": ("#3a8f5c", "^"),
    "tp": ("#17a2b8", "*"),
}


def draw(
    panels: Mapping[str, Sequence[Prediction]], *, title: str, measured: Mapping[tuple[str, int], float] | None = None
) -> Figure:
    """Seconds and efficiency: a row of two axes for each panel.

    Args:
        panels: By what stays fixed as devices are added; each begins with the prediction of one device.
        title: Above all; it may have several lines.
        measured: Seconds of a step by mode and number of devices, as rings in the first panel.
    """
    figure = Figure(figsize=(10, 4.1 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 2, squeeze=False)
    for (seconds, efficiency), (name, found) in zip(rows, panels.items(), strict=True):
        single = found[0]
        _draw(seconds, found, {id(each): 1e3 * each.step_s for each in found})
        _draw(efficiency, found, {id(each): 100 * each.efficiency(single) for each in found})
        seconds.set(yscale="log", ylabel="ms of a step", title=name)
        seconds.yaxis.set_major_formatter("{x:,g}")
        efficiency.set(ylim=(0, 105), ylabel="speed of a device, % of one alone")
    for (mode, count), step_s in (measured or {}).items():
        color, _ = _LINES[mode]
        rows[0][0].plot([count], [1e3 * step_s], "o", ms=12, mfc="none", mec=color, mew=2, label=f"{mode}, measured")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=10, frameon=False, fontsize=8, columnspacing=1)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def save(figure: Figure, path: Path) -> None:
    """In the format that the path's ending names."""
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, found: Sequence[Prediction], values: Mapping[int, float]) -> None:
    counts = sorted({each.num_devices for each in found})
    for mode, (color, marker) in _LINES.items():
        own = [each for each in found if each.mode in (mode, "single")]
        places = [each.num_devices for each in own]
        label = "ddp, ddp_spawn" if mode == "ddp" else mode
        axes.plot(places, [values[id(each)] for each in own], marker=marker, ms=5, color=color, label=label, alpha=0.9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8)
    axes.set_xlabel("devices")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
