"""The page: what of the runs is drawn, and the template with it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from lit_cifar import __version__
from lit_cifar.reporting.evaluation_tables import Split
from lit_cifar.reporting.figures import SPLIT_WORDS, confusion_figure
from lit_cifar.reporting.progress import METRIC as THROUGHPUT
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, pooled
from lit_cifar.tools.html_report import tables
from lit_cifar.tools.html_report.charts import Bar, Line, bar_chart, image_of, line_chart
from lit_cifar.tools.html_report.run_reader import read_run
from lit_cifar.tools.html_report.tables import Runs

_MOST_GROUPS = 25  # classes or ranks of a chart


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
    templates.filters["image_of"] = image_of
    return templates.get_template("page.html").render(
        version=__version__,
        data=next(iter(runs.values())).environment["data"],
        runs=runs,
        summary=tables.summary(runs),
        differences=tables.different_settings(list(runs.values())),
        repeat_command=tables.repeat_command,
        same_samples=tables.same_samples(runs),
        curves=_curves(runs),
        classes=_of_each_split(runs, _classes),
        ranks=_of_each_split(runs, _ranks),
        throughput=_line_chart("Training throughput, images per second", _lines(runs, THROUGHPUT), runs, zero=True),
    )


def _curves(runs: Runs) -> list[Figure]:
    """Loss and accuracy of training and validation."""
    return [
        *_line_chart("Loss", _lines(runs, "val/loss") + _lines(runs, "train/loss", dashed=True), runs),
        *_line_chart("Accuracy", _lines(runs, "val/acc") + _lines(runs, "train/acc", dashed=True), runs, percent=True),
    ]


def _lines(runs: Runs, metric: str, *, dashed: bool = False) -> list[Line]:
    """A metric of each run that was trained, over the epochs or steps that were complete when it was logged."""
    found = []
    for place, (name, run) in enumerate(runs.items()):
        if run.trained and metric in run.metrics:
            steps = run.epochs[0].steps if _by_epoch(runs) else 1
            points = [((step + 1) / steps, value) for step, value in run.metrics[metric]]
            found.append(Line(metric if len(runs) == 1 else f"{name}, {metric}", place, points, dashed))
    return found


def _by_epoch(runs: Runs) -> bool:
    """Whether each run that was trained says how many steps an epoch has."""
    return all(run.epochs for run in runs.values() if run.trained)


def _line_chart(title: str, lines: Sequence[Line], runs: Runs, **options: bool) -> list[Figure]:
    """The chart, unless there is nothing to draw."""
    x_name = "epoch" if _by_epoch(runs) else "optimizer step"
    return [line_chart(title, lines, x_name=x_name, **options)] if lines else []


def _of_each_split(runs: Runs, charts: Callable[[Runs, Split], list[Figure]]) -> list[Figure]:
    return [chart for split in SPLIT_WORDS for chart in charts(runs, split)]


def _ranks(runs: Runs, split: Split) -> list[Figure]:
    """Accuracy of every rank; of very many those that are marked, and those with the lowest accuracy."""
    groups: dict[str, list[Bar]] = {}
    whole = []
    for place, run in enumerate(runs.values()):
        counts = run.ranks.get(split, [])
        for rank, (count, flag) in enumerate(zip(counts, deviates(counts), strict=True)):
            groups.setdefault(f"rank {rank}", []).append(Bar(place, count, flag))
        whole += [Bar(place, pooled(counts))] if counts else []
    if not groups:
        return []
    marked = any(bar.marked for bars in groups.values() for bar in bars)
    title = f"Accuracy by rank, {SPLIT_WORDS[split]}"
    title += "\n! differs from the other ranks by more than chance explains" if marked else ""
    return [_bar_chart(title, groups, runs, whole=whole)]


def _classes(runs: Runs, split: Split) -> list[Figure]:
    """Accuracy of every class, and what was taken for what."""
    counted = [
        (place, name, run.confusion[split]) for place, (name, run) in enumerate(runs.items()) if split in run.confusion
    ]
    if not counted:
        return []
    groups = {
        name: [Bar(place, confusion.of_class(index)) for place, _, confusion in counted]
        for index, name in enumerate(counted[0][2].classes)
    }
    charts = [_bar_chart(f"Accuracy by class, {SPLIT_WORDS[split]}", groups, runs)]
    for _, name, confusion in counted:
        of_run = f"\n{name[-40:]}" if len(runs) > 1 else ""
        title = f"Confusion matrix, {SPLIT_WORDS[split]}{of_run}"
        charts.append(confusion_figure(torch.tensor(confusion.counts), confusion.classes, title=title))
    return charts


def _bar_chart(title: str, groups: Mapping[str, Sequence[Bar]], runs: Runs, *, whole: Sequence[Bar] = ()) -> Figure:
    """Of very many groups those with a mark, and those with the lowest accuracy."""
    order = sorted(groups, key=lambda name: (not any(bar.marked for bar in groups[name]), _accuracy(groups[name])))
    chosen = {*order[:_MOST_GROUPS]}
    if len(chosen) < len(groups):
        marked = any(bar.marked for bars in groups.values() for bar in bars)
        kinds = "marked or with the lowest accuracy" if marked else "with the lowest accuracy"
        title += f"\nthe {len(chosen)} of {len(groups)} {kinds}"
    shown = [(name, bars) for name, bars in groups.items() if name in chosen]
    return bar_chart(title, [*shown, *([("all", whole)] if whole else [])], names=list(runs))


def _accuracy(bars: Iterable[Bar]) -> float:
    """Over all runs; 1 without images, of which nothing is known."""
    count: AccuracyCount = pooled(bar.count for bar in bars)
    return count.accuracy if count.total else 1.0
