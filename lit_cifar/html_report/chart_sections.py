"""The charts of the page: curves, throughput, accuracy by class and by rank, what was taken for what."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from lit_cifar.html_report.bar_chart import Bar, bar_chart
from lit_cifar.html_report.line_chart import Line, line_chart
from lit_cifar.html_report.markup import Markup, joined
from lit_cifar.html_report.matrix_chart import matrix_chart
from lit_cifar.html_report.page_elements import figures, run_name, stroke, table
from lit_cifar.html_report.run_reader import SPLITS, Confusion, RunContents
from lit_cifar.reporting.progress import METRIC as THROUGHPUT
from lit_cifar.reporting.rank_statistics import deviates, pooled

Runs = Mapping[str, RunContents]
Chart = tuple[str, str | None, Markup]

_WORDS = {"train": "training", "val": "validation", "test": "test"}
_MOST_TOGETHER = 3  # runs of which training and validation share a chart
_MOST_CLASSES = 25  # of a chart
_MOST_POINTS = 60  # of a line that shows every logged value
_NUM_MISTAKES = 3


def curves(runs: Runs) -> Markup | None:
    """Loss and accuracy of training and validation; None where nothing was trained."""
    together = sum(run.trained for run in runs.values()) <= _MOST_TOGETHER
    groups = [("val", "train")] if together else [("train",), ("val",)]
    charts, shown = [], set()
    for quantity in ("loss", "acc"):
        for splits in groups:
            lines = [
                line for split in splits for line in _lines(runs, f"{split}/{quantity}", dashed=split != splits[0])
            ]
            word = {"loss": "loss", "acc": "accuracy"}[quantity]
            title = word if together else f"{_WORDS[splits[0]]} {word}"
            unit = "cross entropy, nats" if quantity == "loss" else "accuracy, %"
            charts += _line_chart(
                lines, runs, title.capitalize(), y_name=unit, text=_percent if unit[0] == "a" else _plain
            )
            shown |= {line.run for line in lines}
    strokes = [stroke("validation", dashed=False), stroke("training", dashed=True)] if together else []
    return figures(*charts, legend=_legend(runs, shown) + strokes) if charts else None


def throughput(runs: Runs) -> Markup | None:
    """Images per second of the training; None where it was not logged."""
    lines = [Line(line.name, line.run, _thinned(line.points)) for line in _lines(runs, THROUGHPUT)]
    charts = _line_chart(lines, runs, "Training throughput", y_name="images / s", text=_plain, zero=True)
    return figures(*charts, legend=_legend(runs, {line.run for line in lines})) if charts else None


def _legend(runs: Runs, shown: set[int]) -> list[Markup]:
    """The runs that a chart shows, where there are several on the page."""
    return [run_name(place, name) for place, name in enumerate(runs) if place in shown and len(runs) > 1]


def _lines(runs: Runs, metric: str, *, dashed: bool = False) -> list[Line]:
    """A metric of each run that was trained, over the epochs or steps that were complete when it was logged."""
    found = []
    for place, (name, run) in enumerate(runs.items()):
        if run.trained and metric in run.metrics:
            steps = run.epochs[0].steps if _by_epoch(runs) else 1
            points = [((step + 1) / steps, value) for step, value in run.metrics[metric]]
            found.append(Line(f"{name}, {metric}", place, points, dashed))
    return found


def _by_epoch(runs: Runs) -> bool:
    """Whether each run that was trained says how many steps an epoch has."""
    return all(run.epochs for run in runs.values() if run.trained)


def _line_chart(
    lines: Sequence[Line], runs: Runs, title: str, *, y_name: str, text: Callable[[float], str], zero: bool = False
) -> list[Chart]:
    """The chart, unless there is nothing to draw."""
    values = [y for line in lines for _, y in line.points]
    missing = sum(not math.isfinite(value) for value in values)
    if missing == len(values):
        return []
    note = f"not shown: {missing} values that are nan or infinite" if missing else None
    x_name = "epoch" if _by_epoch(runs) else "optimizer step"
    return [(title, note, line_chart(lines, title=title, x_name=x_name, y_name=y_name, text=text, zero=zero))]


def _plain(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value * 100:.4g}"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of neighbours, where there are more points than one can see."""
    size = math.ceil(len(points) / _MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], statistics.median(y for _, y in part)) for part in parts]


def ranks(runs: Runs) -> Markup | None:
    """Accuracy of every rank in each split; None where no run has counted it."""
    return _each_split(lambda split: _ranks(runs, split))


def classes(runs: Runs) -> Markup | None:
    """Accuracy of every class in each split, and what was taken for what; None where no run has counted it."""
    return _each_split(lambda split: _classes(runs, split))


def _each_split(section: Callable[[str], Markup | None]) -> Markup | None:
    return joined(*map(section, SPLITS)) or None


def _ranks(runs: Runs, split: str) -> Markup | None:
    bars: dict[str, list[Bar]] = {}
    for place, (name, run) in enumerate(runs.items()):
        counts = run.ranks.get(split, [])
        for rank, (count, flag) in enumerate(zip(counts, deviates(counts), strict=True)):
            bars.setdefault(f"rank {rank}", []).append(Bar(name, place, count, flag))
    for place, (name, run) in enumerate(runs.items()):
        if split in run.ranks:
            bars.setdefault("all", []).append(Bar(name, place, pooled(run.ranks[split])))
    if not bars:
        return None
    flagged = any(bar.marked for group in bars.values() for bar in group)
    note = "! differs from the other ranks by more than chance explains" if flagged else None
    title = f"Accuracy by rank, {_WORDS[split]}"
    chart = bar_chart(list(bars.items()), title=title)
    return figures((title, note, chart), legend=_legend(runs, {bar.run for bar in bars["all"]}))


def _classes(runs: Runs, split: str) -> Markup | None:
    counted = [
        (place, name, run.confusion[split]) for place, (name, run) in enumerate(runs.items()) if split in run.confusion
    ]
    if not counted:
        return None
    names = counted[0][2].classes
    chosen = _hardest([confusion for _, _, confusion in counted])
    note = f"the {len(chosen)} of {len(names)} classes with the lowest accuracy" if len(chosen) < len(names) else None
    bars = [
        (names[index], [Bar(name, place, confusion.of_class(index)) for place, name, confusion in counted])
        for index in chosen
    ]
    title = f"Accuracy by class, {_WORDS[split]}"
    charts: list[Chart] = [(title, note, bar_chart(bars, title=title))]
    for _, name, confusion in counted:
        title = f"Confusion matrix, {_WORDS[split]}{f', {name}' if len(runs) > 1 else ''}"
        charts.append((title, note, _matrix(confusion, chosen, title)))
    rows = [(run_name(place, name), _mistakes(confusion)) for place, name, confusion in counted]
    legend = _legend(runs, {place for place, _, _ in counted})
    return joined(figures(*charts, legend=legend), table(["run", f"most frequent mistakes, {_WORDS[split]}"], rows))


def _matrix(confusion: Confusion, chosen: Sequence[int], title: str) -> Markup:
    rows = [[confusion.counts[i][j] for j in chosen] for i in chosen]
    totals = [confusion.of_class(index).total for index in chosen]
    return matrix_chart([confusion.classes[index] for index in chosen], rows, totals=totals, title=title)


def _hardest(confusions: Sequence[Confusion]) -> list[int]:
    """The classes in their order; if there are very many, those with the lowest accuracy over all runs."""
    counts = [pooled(c.of_class(index) for c in confusions) for index in range(len(confusions[0].classes))]

    def accuracy(index: int) -> float:
        return counts[index].accuracy if counts[index].total else 1.0

    return sorted(sorted(range(len(counts)), key=accuracy)[:_MOST_CLASSES])


def _mistakes(confusion: Confusion) -> str:
    cells = [(n, i, j) for i, row in enumerate(confusion.counts) for j, n in enumerate(row) if i != j and n]
    worst = sorted(cells, key=lambda cell: -cell[0])[:_NUM_MISTAKES]
    names, totals = confusion.classes, [sum(row) for row in confusion.counts]
    return "; ".join(f"{names[i]} taken for {names[j]}, {n:,} of {totals[i]:,}" for n, i, j in worst) or "none"
