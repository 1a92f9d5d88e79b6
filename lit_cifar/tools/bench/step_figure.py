"""One training step of all ranks as a picture: compute above, communication below."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lit_cifar.tools.bench.step_events import Interval, RankStep, both, union

_COMPUTE, _OVERLAPPED, _WAITING = "#2f6db5", "#8fc1a3", "#d98c1f"
_LABELS = {
    _COMPUTE: "compute",
    _OVERLAPPED: "communication during compute",
    _WAITING: "waiting: communication without compute",
    "white": "host: neither",
}


def draw(ranks: Sequence[RankStep], *, title: str) -> Figure:
    """A row for each rank, its shares of the step on the right; stages are named by their microbatches."""
    figure = Figure(figsize=(11, 1.6 + 1.0 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    last = max(rank.end for rank in ranks)
    for row, rank in enumerate(ranks):
        _draw_rank(axes, rank, row, shortest=last / 60)
    axes.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.65)
    axes.set_xlim(-last / 200 / 1e3, last * 1.003 / 1e3)
    axes.set_xlabel("milliseconds since the first rank began the step")
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(facecolor=color, edgecolor="#999999", label=label) for color, label in _LABELS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def _draw_rank(axes: Axes, rank: RankStep, row: int, *, shortest: float) -> None:
    compute, communication = rank.compute, rank.communication
    overlapped = both(compute, communication)
    step = _bars([(rank.start, rank.end)])
    axes.broken_barh(step, (row - 0.36, 0.72), facecolor="none", edgecolor="#999999", linewidth=0.6)
    axes.broken_barh(_bars(compute), (row - 0.36, 0.36), color=_COMPUTE, linewidth=0)
    axes.broken_barh(_bars(communication), (row, 0.36), color=_WAITING, linewidth=0)
    axes.broken_barh(_bars(overlapped), (row, 0.36), color=_OVERLAPPED, linewidth=0)
    for stage in rank.stages:
        _draw_stage(axes, stage, row, shortest=shortest)
    shares = rank.shares
    parts = {"compute": shares.compute + shares.overlapped, "waiting": shares.waiting, "host": shares.host}
    words = "\n".join(f"{name} {part / shares.step:.0%}" for name, part in parts.items())
    axes.text(1.01, row, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8)


def _draw_stage(axes: Axes, stage: dict[str, float | str], row: int, *, shortest: float) -> None:
    start, duration = float(stage["ts"]), float(stage["dur"])
    axes.broken_barh(_bars([(start, start + duration)]), (row - 0.48, 0.1), color="#555555", edgecolor="white")
    if duration >= shortest:
        middle = (start + duration / 2) / 1e3
        axes.text(middle, row - 0.5, str(stage["name"]), ha="center", va="bottom", color="#333333", fontsize=8)


def _bars(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    """Start and width in milliseconds; gaps too narrow to be seen are closed."""
    if not intervals:
        return []
    narrow = 1.0 + (intervals[-1][1] - intervals[0][0]) / 4000
    joined = union((start, end + narrow) for start, end in intervals)
    return [(start / 1e3, (end - narrow - start) / 1e3) for start, end in joined]
