"""One training step of all ranks as a picture: compute above, communication below."""

from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from lit_cifar.tools.bench.step_events import STAGE, Interval, RankStep


def draw(ranks: Sequence[RankStep], *, title: str) -> Figure:
    """A row for each rank, its shares of the step on the right; stages are named by their microbatches."""
    figure = Figure(figsize=(11, 1.6 + 1.0 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    shortest = max(rank.end for rank in ranks) / 60
    for row, rank in enumerate(ranks):
        axes.broken_barh(_in_ms([(rank.start, rank.end)]), (row - 0.36, 0.72), facecolor="none", edgecolor="#999999")
        above = axes.broken_barh(_in_ms(rank.compute), (row - 0.36, 0.36), color="#2f6db5", linewidth=0)
        below = axes.broken_barh(_in_ms(rank.communication), (row, 0.36), color="#d98c1f", linewidth=0)
        stages = [event for event in rank.events if event.get("cat") == STAGE]
        axes.broken_barh(_in_ms(map(_span, stages)), (row - 0.48, 0.1), color="#555555", edgecolor="white")
        for event in stages:
            if event["dur"] >= shortest:
                axes.text(sum(_span(event)) / 2e3, row - 0.5, event["name"], ha="center", va="bottom", fontsize=8)
        step = (rank.end - rank.start) / 1e3
        words = "\n".join(f"{name} {part / step:.0%}" for name, part in rank.shares_ms.items())
        axes.text(1.01, row, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.65)
    axes.set_xlabel("milliseconds since the first rank began the step")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = ["compute", "communication; where nothing stands above it, waiting"]
    figure.legend([above, below], names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _span(event: dict[str, float]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _in_ms(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Start and width."""
    return [(start / 1e3, (end - start) / 1e3) for start, end in intervals]
