"""The figures of the page: curves, throughput, accuracy by class and by rank, what was taken for what."""

import math
import statistics
from collections.abc import Sequence

from lit_cifar.html_report.charts import Bar, Line, bar_chart, line_chart, matrix_chart
from lit_cifar.html_report.markup import Markup, element, joined
from lit_cifar.html_report.run import SPLITS, Confusion, Run
from lit_cifar.html_report.overview import run_heads, swatch, table
from lit_cifar.reporting.rank_statistics import deviates, pooled
from lit_cifar.reporting.throughput import METRIC as THROUGHPUT

SPLIT_WORDS = {"train": "training", "val": "validation", "test": "test"}
_MOST_TOGETHER = 3  # runs whose training and validation share a chart
_MOST_CLASSES = 25  # of a matrix or a chart
_MOST_POINTS = 60  # of a line that shows every logged window


def figure(chart: Markup, title: str, *, note: str | None = None) -> Markup:
    """A chart below its title."""
    caption = element("figcaption", title, None if note is None else element("small", note))
    return element("figure", caption, chart)


def legend(names: Sequence[str], *, dashed: bool = False) -> Markup | None:
    """Which marker is which run's; nothing for one run without dashed lines."""
    items = run_heads(names) if len(names) > 1 else []
    if dashed:
        items += [element("span", _dash(kind), word, class_="run") for kind, word in _DASHES.items()]
    return element("p", *items, class_="legend") if items else None


_DASHES = {"line": "validation", "line dashed": "training"}


def _dash(kind: str) -> Markup:
    return element("svg", element("path", d="M0 6H28", class_=kind), viewBox="0 0 28 12", class_="dash", aria_hidden="true")


def curves(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """Loss and accuracy of training and validation; None where nothing was trained."""
    trained = [run for run in runs if run.epochs or "train/loss" in run.metrics]
    together = len(trained) <= _MOST_TOGETHER
    groups = [("train", "val")] if together else [("train",), ("val",)]
    charts = [
        _curve(runs, names, quantity, splits)
        for quantity in ("loss", "acc")
        for splits in groups
    ]
    found = [chart for chart in charts if chart is not None]
    return joined(legend(names, dashed=together), element("div", *found, class_="charts")) if found else None


def _curve(runs: Sequence[Run], names: Sequence[str], quantity: str, splits: Sequence[str]) -> Markup | None:
    lines = [
        Line(f"{name}, {SPLIT_WORDS[split]}", look, points, dashed=split == "train" and len(splits) > 1)
        for look, (run, name) in enumerate(zip(runs, names, strict=True))
        for split in splits
        if (points := _points(run, f"{split}/{quantity}", by_epoch=_by_epoch(runs)))
    ]
    word = "Loss" if quantity == "loss" else "Accuracy"
    title = word if len(splits) > 1 else f"{SPLIT_WORDS[splits[0]].capitalize()} {word.lower()}"
    label = "cross entropy, nats" if quantity == "loss" else "accuracy, %"
    return _lines(lines, runs, title, y_label=label, percent=quantity == "acc")


def throughput(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """Images per second over the training; None where it was not logged."""
    lines = [
        Line(name, look, _thinned(_points(run, THROUGHPUT, by_epoch=_by_epoch(runs))))
        for look, (run, name) in enumerate(zip(runs, names, strict=True))
        if THROUGHPUT in run.metrics
    ]
    chart = _lines(lines, runs, "Training throughput", y_label="images / s", zero=True)
    return None if chart is None else joined(legend(names), element("div", chart, class_="charts"))


def _lines(
    lines: Sequence[Line], runs: Sequence[Run], title: str, *, y_label: str, percent: bool = False, zero: bool = False
) -> Markup | None:
    """The chart; None without a finite value."""
    values = [y for line in lines for _, y in line.points]
    if not any(map(math.isfinite, values)):
        return None
    broken = sum(not math.isfinite(value) for value in values)
    note = f"{broken} values are nan or infinite and left out" if broken else None
    x_label = "epoch" if _by_epoch(runs) else "optimizer step"
    text = (lambda value: f"{value * 100:.4g}") if percent else (lambda value: f"{value:,.4g}")
    return figure(
        line_chart(lines, title=title, x_label=x_label, y_label=y_label, text=text, zero=zero), title, note=note
    )


def _by_epoch(runs: Sequence[Run]) -> bool:
    """Whether every run that has trained says how many steps an epoch has."""
    return all(run.epochs for run in runs if "train/loss_step" in run.metrics or "train/loss" in run.metrics)


def _points(run: Run, metric: str, *, by_epoch: bool) -> list[tuple[float, float]]:
    """Values over the epochs or steps that were complete when they were logged."""
    scale = run.epochs[0].steps if by_epoch and run.epochs else 1
    return [((step + 1) / scale, value) for step, value in run.metrics.get(metric, [])]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of neighbours, where there are more points than one can see."""
    size = math.ceil(len(points) / _MOST_POINTS) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], statistics.median(y for _, y in part)) for part in parts]


def by_class(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """Accuracy of every class, and what was taken for what, for each split; None where no run has counted them."""
    return _by_split([(split, _classes(runs, names, split)) for split in SPLITS])


def _classes(runs: Sequence[Run], names: Sequence[str], split: str) -> Markup | None:
    counted = [(look, run.confusion[split]) for look, run in enumerate(runs) if split in run.confusion]
    if not counted:
        return None
    chosen = _hardest([confusion for _, confusion in counted])
    classes = counted[0][1].classes
    groups = [
        (classes[index], [Bar(names[look], look, confusion.of_class(index)) for look, confusion in counted])
        for index in chosen
    ]
    note = f"the {len(chosen)} of {len(classes)} classes with the lowest accuracy" if len(chosen) < len(classes) else None
    title = f"Accuracy by class, {SPLIT_WORDS[split]}"
    charts = [figure(bar_chart(groups, title=title), title, note=note)]
    for look, confusion in counted:
        rows = [[confusion.counts[i][j] for j in chosen] for i in chosen]
        title = f"Confusion matrix, {SPLIT_WORDS[split]}" + (f", {names[look]}" if len(runs) > 1 else "")
        chart = matrix_chart([classes[index] for index in chosen], rows, title=title)
        charts.append(figure(chart, title, note=note))
    return joined(legend(names) , element("div", *charts, class_="charts"), _mistakes(counted, names))


def _hardest(confusions: Sequence[Confusion]) -> list[int]:
    """The classes, in their order; of very many those with the lowest accuracy."""
    counts = [pooled(c.of_class(index) for c in confusions) for index in range(len(confusions[0].classes))]
    seen = [index for index, count in enumerate(counts) if count.total] if len(counts) > _MOST_CLASSES else range(len(counts))
    return sorted(sorted(seen, key=lambda index: counts[index].accuracy)[:_MOST_CLASSES]) if len(counts) > _MOST_CLASSES else list(seen)


def _mistakes(counted: Sequence[tuple[int, Confusion]], names: Sequence[str]) -> Markup:
    """The most frequent mistakes of each run, in words."""
    rows = []
    for look, confusion in counted:
        cells = [
            (count, i, j) for i, row in enumerate(confusion.counts) for j, count in enumerate(row) if i != j and count
        ]
        worst = sorted(cells, key=lambda cell: -cell[0])[:3]
        text = "; ".join(
            f"{confusion.classes[i]} taken for {confusion.classes[j]}, {count:,} of {confusion.of_class(i).total:,}"
            for count, i, j in worst
        )
        rows.append([element("span", swatch(look), names[look], class_="run"), text or "no mistakes"])
    return table(["run", "most frequent mistakes"], rows)


def by_rank(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """Accuracy of every rank, for each split; None where no run has counted it."""
    return _by_split([(split, _ranks(runs, names, split)) for split in SPLITS])


def _ranks(runs: Sequence[Run], names: Sequence[str], split: str) -> Markup | None:
    counted = [(look, run.ranks[split]) for look, run in enumerate(runs) if split in run.ranks]
    if not counted:
        return None
    flags = {look: deviates(counts) for look, counts in counted}
    groups = [
        (
            f"rank {rank}",
            [
                Bar(names[look], look, counts[rank], "beyond chance" if flags[look][rank] else "")
                for look, counts in counted
                if rank < len(counts)
            ],
        )
        for rank in range(max(len(counts) for _, counts in counted))
    ]
    groups.append(("all", [Bar(names[look], look, pooled(counts)) for look, counts in counted]))
    flagged = any(map(any, flags.values()))
    note = "!: differs from the other ranks by more than chance explains" if flagged else None
    title = f"Accuracy by rank, {SPLIT_WORDS[split]}"
    return joined(legend(names), element("div", figure(bar_chart(groups, title=title), title, note=note), class_="charts"))


def _by_split(sections: Sequence[tuple[str, Markup | None]]) -> Markup | None:
    found = [content for _, content in sections if content is not None]
    return joined(*found) if found else None
