"""Pictures for readers who are new: what each mode splits, and what a loss curve and a check say of two bugs."""

import json
import textwrap
from pathlib import Path
from typing import NamedTuple

import gallery
import notebooks_path  # noqa: F401  # for `analysis`
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Rectangle

from analysis.run_frames import BLUE, GREY, RED
from lit_cifar.mode.table import MODES

ORANGE, PALE = "#e8912d", "#dbe6f1"
SAMPLES = LAYERS = 4  # of each drawing


class Device(NamedTuple):
    """What one device of a drawing holds."""

    samples: tuple[int, ...]  # of the batch
    layers: tuple[int, ...] = (0, 1, 2, 3)
    half: int | None = None  # of each layer: which half it keeps, if not the whole


LEFT, RIGHT, WHOLE = (0, 1), (2, 3), (0, 1, 2, 3)
FRONT, BACK = (0, 1), (2, 3)
# For each mode the processes, and the devices of each.
DRAWN: dict[str, list[list[Device]]] = {
    "single": [[Device(WHOLE)]],
    "dp": [[Device(LEFT), Device(RIGHT)]],
    "ddp": [[Device(LEFT)], [Device(RIGHT)]],
    "ddp_spawn": [[Device(LEFT)], [Device(RIGHT)]],
    "mp": [[Device(WHOLE, FRONT), Device(WHOLE, BACK)]],
    "ddp_mp": [[Device(part, layers) for layers in (FRONT, BACK)] for part in (LEFT, RIGHT)],
    "pp": [[Device(WHOLE, FRONT)], [Device(WHOLE, BACK)]],
    "ddp_pp": [[Device(part, layers)] for part in (LEFT, RIGHT) for layers in (FRONT, BACK)],
    "fsdp2": [[Device(LEFT, half=0)], [Device(RIGHT, half=1)]],
    "tp": [[Device(WHOLE, half=0)], [Device(WHOLE, half=1)]],
}
SPLIT = {
    "single": "nothing",
    "dp": "batch",
    "ddp": "batch",
    "ddp_spawn": "batch",
    "mp": "layers",
    "ddp_mp": "batch, layers",
    "pp": "layers",
    "ddp_pp": "batch, layers",
    "fsdp2": "batch, weights",
    "tp": "inside layers",
}


def modes(_: None = None) -> Figure:
    """Ten drawings: which samples and which layers each device has, and which devices are one process."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    for axes, row in zip(figure.subplots(2, 5).flat, MODES, strict=True):
        axes.set_title(row.name, fontsize=13, fontweight="bold", pad=2)
        axes.text(2, 5.45, SPLIT[row.name], ha="center", fontsize=10, color=GREY)
        _draw(axes, DRAWN[row.name])
        axes.set(xlim=(-0.1, 4.1), ylim=(-0.1, 5.9))
        axes.set_axis_off()
    handles = [
        Rectangle((0, 0), 1, 1, color=ORANGE, label="samples of a batch"),
        Rectangle((0, 0), 1, 1, color=BLUE, label="layers"),
        Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=GREY, label="device"),
        Line2D([], [], color="black", linestyle=(0, (2, 1.5)), label="process"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=11, columnspacing=1)
    return figure


def _draw(axes: Axes, processes: list[list[Device]]) -> None:
    """Devices side by side; a second pipeline or process of two devices in a second row."""
    devices = [(number, device) for number, process in enumerate(processes) for device in process]
    rows = 2 if len(devices) == 4 else 1
    height, width = 5.2 / rows, 2.0 if len(devices) > 1 else 4.0
    for place, (_, device) in enumerate(devices):
        x, y = (place % 2) * width, (rows - 1 - place // 2) * height
        if len(devices) == 1:
            x, width = 1.0, 2.0
        _draw_device(axes, device, x=x + 0.22, y=y + 0.22, width=width - 0.44, height=height - 0.44)
    for number in range(len(processes)):
        own = [place for place, (process, _) in enumerate(devices) if process == number]
        x = 1.0 if len(devices) == 1 else min(place % 2 for place in own) * width
        y = (rows - 1 - own[0] // 2) * height
        box = (x + 0.06, y + 0.06), len(own) * width - 0.12, height - 0.12
        axes.add_patch(Rectangle(*box, fill=False, linestyle=(0, (2, 1.5)), linewidth=1.2, edgecolor="black"))


def _draw_device(axes: Axes, device: Device, *, x: float, y: float, width: float, height: float) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.15", "facecolor": "white", "edgecolor": GREY, "linewidth": 1.2}
    axes.add_patch(FancyBboxPatch((x, y), width, height, **style))
    left, span = x + 0.14, width - 0.28
    cell, line = span / SAMPLES, (height - 0.3) / (LAYERS + 1.3)
    for sample in range(SAMPLES):
        color = ORANGE if sample in device.samples else "#f6e6d3"
        start = left + sample * cell + 0.03
        axes.add_patch(Rectangle((start, y + 0.15), cell - 0.06, line * 0.8, linewidth=0, facecolor=color))
    for layer in range(LAYERS):
        bottom = y + 0.15 + line * (1.3 + layer)
        axes.add_patch(Rectangle((left, bottom), span, line * 0.8, linewidth=0, facecolor=PALE))
        if layer in device.layers:
            start, share = (left, span) if device.half is None else (left + device.half * span / 2, span / 2)
            axes.add_patch(Rectangle((start, bottom), share, line * 0.8, linewidth=0, facecolor=BLUE))


def two_bugs(record: Path) -> Figure:
    """The loss of `examples/two_bugs.py` among those of correct runs, and what `relations` says of its bugs."""
    losses = json.loads((record / "losses.json").read_text())
    verdicts = json.loads((record / "relations.json").read_text())["verdicts"]
    figure = Figure(figsize=(7.6, 2.1), layout="constrained")
    axes, terminal = figure.subplots(1, 2, width_ratios=(1, 1.2))
    correct = losses["mended"]
    for number, run in enumerate(correct):
        label = f"{len(correct)} correct runs, other seeds" if number == 0 else None
        axes.plot(gallery.smooth(run), color="0.78", linewidth=1.5, label=label)
    axes.plot(gallery.smooth(losses["with_bugs"]), color=RED, linewidth=1.8, label="with two bugs")
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.set_ylabel("training loss", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    terminal.set_axis_off()
    terminal.set(xlim=(0, 1), ylim=(0, 1))
    terminal.add_patch(Rectangle((0, 0), 1, 1, facecolor="#1e1e1e"))
    lines = ["$ python -m lit_cifar relations two_bugs.py"]
    failed = {verdict["relation"]: verdict["text"] for verdict in verdicts if verdict["outcome"] == "fail"}
    for relation, text in failed.items():
        lines += [f"FAIL  {relation}", *(f"      {line}" for line in textwrap.wrap(text.partition(";")[0], 40))]
    for number, line in enumerate(lines):
        color = "#ff7b72" if line.startswith("FAIL") else "#e6e6e6"
        style = {"family": "monospace", "fontsize": 8, "va": "center", "color": color}
        terminal.text(0.03, 1 - (number + 0.8) / (len(lines) + 0.6), line, **style)
    return figure
