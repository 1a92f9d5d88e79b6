"""The command, its tables (facts and results of runs, their differences, how to repeat them) and its charts."""

import argparse
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from lit_cifar import __version__
from lit_cifar.errors import ConfigError, printable
from lit_cifar.reporting.evaluation_tables import Split
from lit_cifar.reporting.figures import SPLIT_WORDS, confusion_figure
from lit_cifar.reporting.progress import METRIC as THROUGHPUT
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, pooled
from lit_cifar.reporting.run_report import counted, shown
from lit_cifar.tools.report.charts import Bar, Line, bar_chart, image_of, line_chart
from lit_cifar.tools.report.run_reader import Confusion, Epoch, RunContents, read_run
from lit_cifar.tools.terminal import CommandParser, say

Runs = Mapping[str, RunContents]  # runs by name
_COMMANDS = ("fit", "validate", "test")
_MOST_GROUPS = 25  # most classes or ranks of a chart
_MOST_CLASSES, _WORST_CLASSES = 20, 10  # most classes of a table, and how many are shown of more
_DESCRIPTION = """\
Write one HTML page about runs of `fit`, `validate` and `test`: what they reached, in what their settings differ, loss
and accuracy, classes, ranks, throughput, samples, and the command that repeats each. The page is a single file that
loads nothing from the network. Several runs of the same data set are shown in the same charts."""


def main(args: list[str]) -> int:
    options = report_parser().parse_args(args)
    page = page_of([Path(run) for run in options.runs])
    target = Path(options.output)
    try:
        target.write_bytes(page.encode(errors="replace"))
    except OSError as error:
        problem = f"--output={target} cannot be written: {error.strerror}"
        raise ConfigError(problem, remedy="choose another file") from error
    say(f"wrote {target}, {target.stat().st_size / 1000:,.0f} kB")
    return 0


def report_parser() -> argparse.ArgumentParser:
    parser = CommandParser("report", description=_DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run folders.")
    where = "Where to write the page (default: report.html)."
    parser.add_argument("--output", default="report.html", metavar="FILE", help=where)
    return parser


def page_of(folders: Sequence[Path]) -> str:
    """One HTML page about these runs, which loads nothing; a `ConfigError` if they cannot be read or compared."""
    runs = {printable(str(folder)): read_run(folder) for folder in folders}
    _check_comparable(runs)
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    templates.filters["image_of"] = image_of
    facts = [_facts(run) for run in runs.values()]
    last_epochs = {(run.epochs[-1].number, run.epochs[-1].digest) for run in runs.values() if run.epochs}
    return templates.get_template("page.html").render(
        version=__version__,
        data=next(iter(runs.values())).environment["data"],
        runs=runs,
        summary={name: [fact[name] for fact in facts] for name in facts[0] if any(fact[name] for fact in facts)},
        differences=different_settings(list(runs.values())),
        repeat_command=repeat_command,
        same_samples=len(last_epochs) == 1 < sum(bool(run.epochs) for run in runs.values()),
        curves=_curves(runs),
        classes=[chart for split in SPLIT_WORDS for chart in _classes(runs, split)],
        class_tables=[table for split in SPLIT_WORDS for table in _class_tables(runs, split)],
        ranks=[chart for split in SPLIT_WORDS for chart in _ranks(runs, split)],
        throughput=_line_chart("Training throughput, images per second", _lines(runs, THROUGHPUT), runs, zero=True),
    )


def _check_comparable(runs: Runs) -> None:
    """A `ConfigError` unless the runs have the same data set, and the same classes where they are known."""
    first, *others = runs
    for name in others:
        for what, one, other in zip(("data", "classes"), _data_of(runs[first]), _data_of(runs[name]), strict=True):
            if one and other and one != other:
                raise ConfigError(
                    f"the runs have different {what}, and cannot be compared:\n{first} has {one}\n{name} has {other}",
                    remedy="make a page for each",
                )


def _data_of(run: RunContents) -> tuple[str, str]:
    classes = [confusion.classes for confusion in run.confusion.values()]
    return run.environment["data"], ", ".join(classes[0]) if classes else ""


def different_settings(runs: Sequence[RunContents]) -> dict[str, list[str | None]]:
    """The flags in which the runs differ, each with the value of every run, None where a run has no such flag.

    A part of the configuration that some run lacks is left out: `test` has no flags for checkpoints.
    """
    parts = set.intersection(*({key.partition(".")[0] for key in run.settings} for run in runs))
    keys = dict.fromkeys(key for run in runs for key in run.settings if key.partition(".")[0] in parts)
    rows = {key: [run.settings.get(key) for run in runs] for key in keys}
    if any(map(_began_with, runs)):
        rows["ckpt_path"] = [_began_with(run) or run.settings.get("ckpt_path") for run in runs]
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _facts(run: RunContents) -> dict[str, str | None]:
    """The facts and results of a run; None for what is not known."""
    about, settings, git = run.environment, run.settings, run.environment["git"]
    best, speeds = ([value for _, value in run.metrics.get(name, [])] for name in ("val/acc", THROUGHPUT))
    return {
        "command": command_of(run),
        "test accuracy": _accuracy(run, "test"),
        "validation accuracy": _accuracy(run, "val"),
        "best validation": f"{max(best):.2%}, the best of {len(best)}" if len(best) > 1 else None,
        "training loss": f"{run.metrics['train/loss'][-1][1]:.4f}" if "train/loss" in run.metrics else None,
        "training": _extent(run) if run.trained else None,
        "images per second": f"{statistics.median(speeds):,.0f}, the median of {len(speeds)}" if speeds else None,
        "network": _network(settings),
        "mode": f"{about['strategy']}, {counted(about['world_size'], 'process', 'processes')}, {about['precision']}",
        "global batch": settings.get("data.batch_size"),
        "hardware": _hardware(about),
        "torch": about["versions"].get("torch"),
        "commit": f"{git['commit'][:12]}{', modified' if git.get('modified') else ''}" if git else None,
        "started": about["started"].replace("T", " ").replace("+00:00", " UTC"),
    }


def _accuracy(run: RunContents, split: str) -> str | None:
    count = pooled(run.ranks.get(split, []))
    if not count.total:
        return None
    low, high = count.interval()
    return f"{count.accuracy:.2%} of {count.total:,} ({low:.1%} to {high:.1%})"


def _extent(run: RunContents) -> str:
    last = max(logged[-1][0] for name, logged in run.metrics.items() if name.startswith("train/"))
    epochs = f"{counted(run.epochs[-1].number + 1, 'epoch')}, " if run.epochs else ""
    return f"{epochs}{counted(last + 1, 'step')}"


def _network(settings: Mapping[str, str]) -> str | None:
    if settings.get("model.network", "null") != "null":
        return settings["model.network"]
    arch, stem = settings.get("model.arch"), settings.get("model.stem", "null")
    return arch if arch is None or stem == "null" else f"{arch}, {stem} stem"


def _hardware(about: Mapping[str, Any]) -> str:
    if about["device"] == "cuda" and about["gpus"]:
        return f"{about.get('num_devices', len(about['gpus']))} x {about['gpus'][0]}"
    return f"{about['cpu'].get('model')}, {counted(about['cpu'].get('cores', 0), 'core')}"


def command_of(run: RunContents) -> str | None:
    """The command of the run: `fit`, `validate` or `test`; None if another program has started it."""
    return next((word for word in _words(run) if word in _COMMANDS), None)


def repeat_command(run: RunContents) -> str | None:
    """The command that repeats the run from its `config.yaml`; None if another program has started it.

    The file names neither the checkpoint that a fit began with, nor a number of devices that was left to the machine.
    """
    command, about = command_of(run), run.environment
    if command is None:
        return None
    flags = [f"--config {shown(run.folder / 'config.yaml')}"]
    if run.settings.get("trainer.devices") == "auto" and about["world_size"] > 1 == about.get("num_nodes"):
        flags.append(f"--trainer.devices={about['world_size']}")
    if path := _began_with(run):
        flags.append(shlex.join(["--ckpt_path", path]))
    checkout = f"git checkout {about['git']['commit']}\n" if about["git"] else ""
    return f"{checkout}python -m lit_cifar {command} {' '.join(flags)}"


def _began_with(run: RunContents) -> str | None:
    """The checkpoint that a fit began with."""
    words = [*_words(run), ""] if command_of(run) == "fit" else []
    given = [one.partition("=")[2] or after for one, after in pairwise(words) if one.partition("=")[0] == "--ckpt_path"]
    return given[-1] if given else None


def _words(run: RunContents) -> list[str]:
    """The command that was typed, in words; none where the name of a program has a quotation mark."""
    try:
        return shlex.split(run.environment["command"])
    except ValueError:
        return []


def _curves(runs: Runs) -> list[Figure]:
    loss, acc = (_lines(runs, f"val/{name}") + _lines(runs, f"train/{name}", dashed=True) for name in ("loss", "acc"))
    return _line_chart("Loss", loss, runs) + _line_chart("Accuracy", acc, runs, percent=True)


def _lines(runs: Runs, metric: str, *, dashed: bool = False) -> list[Line]:
    """A metric of each run that was trained, over the epochs or steps that were complete at the time."""
    found = []
    for place, (name, run) in enumerate(runs.items()):
        if run.trained and metric in run.metrics:
            place_of = partial(_epochs_done, run.epochs) if _by_epoch(runs) else float
            points = [(place_of(step + 1), value) for step, value in run.metrics[metric]]
            found.append(Line(metric if len(runs) == 1 else f"{name}, {metric}", place, points, dashed))
    return found


def _epochs_done(epochs: Sequence[Epoch], steps: int) -> float:
    """Epochs after so many optimizer steps of a training: after a resume one may have other steps, the last be cut."""
    steps -= epochs[0].number * epochs[0].steps  # of epochs in another folder
    for epoch in epochs[:-1]:
        if steps <= epoch.steps:
            return epoch.number + steps / epoch.steps
        steps -= epoch.steps
    last = epochs[-1]
    return last.number + steps / last.steps * last.samples / max(epoch.samples for epoch in epochs)


def _by_epoch(runs: Runs) -> bool:
    """Whether each run that was trained tells the number of steps of an epoch."""
    return all(run.epochs for run in runs.values() if run.trained)


def _line_chart(title: str, lines: Sequence[Line], runs: Runs, **options: bool) -> list[Figure]:
    """The chart, unless there is nothing to draw."""
    x_name = "epoch" if _by_epoch(runs) else "optimizer step"
    return [line_chart(title, lines, x_name=x_name, **options)] if lines else []


def _ranks(runs: Runs, split: Split) -> list[Figure]:
    groups: dict[str, list[Bar]] = {}
    whole = []
    for place, run in enumerate(runs.values()):
        counts = run.ranks.get(split, [])
        for rank, (count, flag) in enumerate(zip(counts, deviates(counts), strict=True)):
            groups.setdefault(f"rank {rank}", []).append(Bar(place, count, flag))
        whole += [Bar(place, pooled(counts))] if counts else []
    if not groups:
        return []
    return [_bar_chart(f"Accuracy by rank, {SPLIT_WORDS[split]}", groups, runs, whole=whole)]


def _classes(runs: Runs, split: Split) -> list[Figure]:
    found = {place: run.confusion[split] for place, run in enumerate(runs.values()) if split in run.confusion}
    if not found:
        return []
    names = enumerate(next(iter(found.values())).classes)
    groups = {name: [Bar(place, each.of_class(index)) for place, each in found.items()] for index, name in names}
    charts = [_bar_chart(f"Accuracy by class, {SPLIT_WORDS[split]}", groups, runs)]
    for place, confusion in found.items():
        title = f"Confusion matrix, {SPLIT_WORDS[split]}" + (f"\n{[*runs][place][-40:]}" if len(runs) > 1 else "")
        charts.append(confusion_figure(torch.tensor(confusion.counts), confusion.classes, title=title))
    return charts


def _class_tables(runs: Runs, split: Split) -> list[tuple[str, Confusion, list[Any]]]:
    """The title of each run's table of classes, its counts, and the rows that are shown."""
    found = {name: run.confusion[split] for name, run in runs.items() if split in run.confusion}
    return [
        (SPLIT_WORDS[split].capitalize() + (f", {name}" if len(runs) > 1 else ""), confusion, _class_rows(confusion))
        for name, confusion in found.items()
        if not math.isnan(confusion.balanced_accuracy)
    ]


def _class_rows(confusion: Confusion) -> list[tuple[str, AccuracyCount, str | None]]:
    """Name and count of each class, and what most of its wrong images were taken for; of very many only the worst."""
    rows = [
        (name, confusion.of_class(index), confusion.most_confused(index))
        for index, name in enumerate(confusion.classes)
    ]
    if len(rows) <= _MOST_CLASSES:
        return rows
    return sorted(rows, key=lambda row: (row[1].total == 0, row[1].accuracy))[:_WORST_CLASSES]


def _bar_chart(title: str, groups: Mapping[str, Sequence[Bar]], runs: Runs, *, whole: Sequence[Bar] = ()) -> Figure:
    """Draw the groups; of very many only those with a mark, and those with the lowest accuracy."""
    marked = {name for name, bars in groups.items() if any(bar.marked for bar in bars)}
    if marked:
        title += "\n! differs from the other ranks by more than chance explains"
    chosen = {*sorted(groups, key=lambda name: (name not in marked, _accuracy_of(groups[name])))[:_MOST_GROUPS]}
    if len(chosen) < len(groups):
        kinds = "marked or with the lowest accuracy" if marked else "with the lowest accuracy"
        title += f"\nthe {len(chosen)} of {len(groups)} {kinds}"
    drawn = [(name, bars) for name, bars in groups.items() if name in chosen]
    return bar_chart(title, [*drawn, *([("all", whole)] if whole else [])], names=list(runs))


def _accuracy_of(bars: Iterable[Bar]) -> float:
    """Accuracy over all runs; 1 without images."""
    count = pooled(bar.count for bar in bars)
    return count.accuracy if count.total else 1.0
