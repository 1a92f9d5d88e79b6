"""The page: what of the runs is drawn, and the template with it."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lit_cifar import __version__
from lit_cifar.reporting.progress import METRIC as THROUGHPUT
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, pooled
from lit_cifar.reporting.run_reader import SPLITS, Confusion, read_run
from lit_cifar.tools.html_report import tables
from lit_cifar.tools.html_report.charts import COLORS, MARKERS, Bar, Chart, Line, bar_chart, line_chart, matrix_chart
from lit_cifar.tools.html_report.tables import Runs

_WORDS = {"train": "training", "val": "validation", "test": "test"}
_MOST_TOGETHER = 3  # runs of which training and validation share a chart
_MOST_GROUPS = 25  # classes or ranks of a chart
_MOST_POINTS = 60  # of a line that shows every logged value
_NUM_MISTAKES = 3


class Charts(NamedTuple):
    """Charts with a legend for all of them."""

    charts: Sequence[Chart]
    runs: Sequence[int]  # places of the runs that they show
    strokes: bool = False  # whether solid lines are of the validation, and dashed ones of the training
    mistakes: Sequence[str] = ()  # of each of the runs the most frequent ones
    split: str = ""  # which images `mistakes` are of, in a word


def page_of(folders: Sequence[Path]) -> str:
    """One HTML page about the runs in these folders, which loads nothing from anywhere.

    Raises:
        ConfigError: A folder is not that of a run, is given twice, or has a damaged file; or the runs have different
            data sets.
    """
    runs = dict(zip(tables.names_of(folders), map(read_run, folders), strict=True))
    tables.check_comparable(runs)
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return templates.get_template("page.html").render(
        version=__version__,
        colors=COLORS,
        symbols=list(MARKERS.values()),
        data=next(iter(runs.values())).environment["data"],
        names=list(runs),
        runs=list(runs.values()),
        summary=tables.summary(runs),
        differences=tables.different_settings(list(runs.values())),
        repeat_command=tables.repeat_command,
        same_samples=tables.same_samples(runs),
        curves=_curves(runs),
        classes=_of_each_split(runs, _classes),
        ranks=_of_each_split(runs, _ranks),
        throughput=_throughput(runs),
    )


def _curves(runs: Runs) -> Charts | None:
    """Loss and accuracy of training and validation; None where nothing was trained."""
    together = sum(run.trained for run in runs.values()) <= _MOST_TOGETHER
    groups = [("val", "train")] if together else [("train",), ("val",)]
    charts, shown = [], set()
    for quantity, word, unit, text in (
        ("loss", "loss", "cross entropy, nats", _plain),
        ("acc", "accuracy", "accuracy, %", _percent),
    ):
        for splits in groups:
            lines = [
                line for split in splits for line in _lines(runs, f"{split}/{quantity}", dashed=split != splits[0])
            ]
            title = word if together else f"{_WORDS[splits[0]]} {word}"
            charts += _line_chart(title.capitalize(), lines, runs, y_name=unit, text=text)
            shown |= {line.run for line in lines}
    return Charts(charts, sorted(shown), strokes=together) if charts else None


def _throughput(runs: Runs) -> Charts | None:
    """Images per second of the training; None where it was not logged."""
    lines = [Line(line.name, line.run, _thinned(line.points)) for line in _lines(runs, THROUGHPUT)]
    charts = _line_chart("Training throughput", lines, runs, y_name="images / s", text=_plain, zero=True)
    return Charts(charts, [line.run for line in lines]) if charts else None


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
    title: str, lines: Sequence[Line], runs: Runs, *, y_name: str, text: Callable[[float], str], zero: bool = False
) -> list[Chart]:
    """The chart, unless there is nothing to draw."""
    values = [y for line in lines for _, y in line.points]
    missing = sum(not math.isfinite(value) for value in values)
    if missing == len(values):
        return []
    note = f"not shown: {missing} values that are nan or infinite" if missing else None
    x_name = "epoch" if _by_epoch(runs) else "optimizer step"
    return [line_chart(title, lines, x_name=x_name, y_name=y_name, text=text, zero=zero, note=note)]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value * 100:.4g}"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of neighbours, where there are more points than one can see."""
    size = math.ceil(len(points) / _MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], statistics.median(y for _, y in part)) for part in parts]


def _of_each_split(runs: Runs, charts: Callable[[Runs, str], Charts | None]) -> list[Charts]:
    """The charts of the splits that some run has counted."""
    return [found for split in SPLITS if (found := charts(runs, split)) is not None]


def _ranks(runs: Runs, split: str) -> Charts | None:
    """Accuracy of every rank; of very many those that are marked, and those with the lowest accuracy."""
    counted = [(place, name, run.ranks[split]) for place, (name, run) in enumerate(runs.items()) if split in run.ranks]
    if not counted:
        return None
    groups: dict[int, list[Bar]] = {}
    for place, name, counts in counted:
        for rank, (count, flag) in enumerate(zip(counts, deviates(counts), strict=True)):
            groups.setdefault(rank, []).append(Bar(name, place, count, flag))
    marked = [rank for rank, bars in groups.items() if any(bar.marked for bar in bars)]
    by_accuracy = _by_accuracy({rank: [bar.count for bar in bars] for rank, bars in groups.items()})
    chosen = sorted([*dict.fromkeys([*marked, *by_accuracy])][:_MOST_GROUPS])
    notes = ["! differs from the other ranks by more than chance explains"] if marked else []
    if len(chosen) < len(groups):
        notes.append(f"{len(chosen)} of {len(groups)} ranks: {'marked ones and ' if marked else ''}the least accurate")
    whole = [Bar(name, place, pooled(counts)) for place, name, counts in counted]
    bars = [*((f"rank {rank}", groups[rank]) for rank in chosen), ("all", whole)]
    chart = bar_chart(f"Accuracy by rank, {_WORDS[split]}", bars, note="; ".join(notes) or None)
    return Charts([chart], [place for place, _, _ in counted])


def _classes(runs: Runs, split: str) -> Charts | None:
    """Accuracy of every class, and what was taken for what."""
    counted = [
        (place, name, run.confusion[split]) for place, (name, run) in enumerate(runs.items()) if split in run.confusion
    ]
    if not counted:
        return None
    names = counted[0][2].classes
    counts = {index: [confusion.of_class(index) for _, _, confusion in counted] for index in range(len(names))}
    chosen = sorted(_by_accuracy(counts)[:_MOST_GROUPS])
    note = f"the {len(chosen)} of {len(names)} classes with the lowest accuracy" if len(chosen) < len(names) else None
    bars = [
        (names[index], [Bar(name, place, confusion.of_class(index)) for place, name, confusion in counted])
        for index in chosen
    ]
    charts = [bar_chart(f"Accuracy by class, {_WORDS[split]}", bars, note=note)]
    for _, name, confusion in counted:
        title = f"Confusion matrix, {_WORDS[split]}{f', {name}' if len(runs) > 1 else ''}"
        charts.append(matrix_chart(title, confusion, chosen, note=note))
    mistakes = [_mistakes(confusion) for _, _, confusion in counted]
    return Charts(charts, [place for place, _, _ in counted], mistakes=mistakes, split=_WORDS[split])


def _by_accuracy(counts: dict[int, list[AccuracyCount]]) -> list[int]:
    """The numbers of classes or ranks, the least accurate over all runs first, those without images last."""
    sums: Iterable[tuple[int, AccuracyCount]] = ((number, pooled(each)) for number, each in counts.items())
    accuracies = {number: count.accuracy if count.total else 1.0 for number, count in sums}
    return sorted(accuracies, key=accuracies.__getitem__)


def _mistakes(confusion: Confusion) -> str:
    cells = [(n, i, j) for i, row in enumerate(confusion.counts) for j, n in enumerate(row) if i != j and n]
    worst = sorted(cells, key=lambda cell: -cell[0])[:_NUM_MISTAKES]
    names, totals = confusion.classes, [sum(row) for row in confusion.counts]
    return "; ".join(f"{names[i]} taken for {names[j]}, {n:,} of {totals[i]:,}" for n, i, j in worst) or "none"
