"""The tables of the page: what the runs are and reached, in what they differ, their samples, how to repeat them."""

import shlex
import statistics
from collections.abc import Mapping
from typing import Any

from lit_cifar.html_report.markup import Markup, element, joined
from lit_cifar.html_report.page_elements import run_name, table
from lit_cifar.html_report.run_differences import different_settings
from lit_cifar.html_report.run_reader import RunContents
from lit_cifar.reporting.progress import METRIC as THROUGHPUT
from lit_cifar.reporting.run_report import shown

Runs = Mapping[str, RunContents]
NOTHING = "\N{EN DASH}"
_COMMANDS = ("fit", "validate", "test")


def summary(runs: Runs) -> Markup:
    """What each run is, and what it has reached; facts that no run has are left out."""
    facts = [_facts(run) for run in runs.values()]
    rows = [(name, *(fact[name] or NOTHING for fact in facts)) for name in facts[0]]
    return table(["", *_heads(runs)], [row for row in rows if set(row[1:]) != {NOTHING}])


def _heads(runs: Runs) -> list[Markup]:
    return [run_name(place, name) for place, name in enumerate(runs)]


def _facts(run: RunContents) -> dict[str, str | None]:
    about, settings = run.environment, run.settings
    return {
        "command": command_of(run),
        "test accuracy": _accuracy(run, "test"),
        "validation accuracy": _accuracy(run, "val"),
        "best validation": _best(run),
        "training loss": f"{run.metrics['train/loss'][-1][1]:.4f}" if "train/loss" in run.metrics else None,
        "training": _extent(run),
        "images per second": _throughput(run),
        "network": _network(settings),
        "mode": f"{about['strategy']}, {_count(about['world_size'], 'process', 'processes')}, {about['precision']}",
        "global batch": settings.get("data.batch_size"),
        "hardware": _hardware(about),
        "torch": about["versions"].get("torch"),
        "commit": _commit(about),
        "started": about["started"].replace("T", " ").replace("+00:00", " UTC"),
    }


def _accuracy(run: RunContents, split: str) -> str | None:
    count = run.count(split)
    if count is None or not count.total:
        return None
    low, high = count.interval()
    return f"{count.accuracy:.2%} of {count.total:,} ({low:.1%} to {high:.1%})"


def _best(run: RunContents) -> str | None:
    values = [value for _, value in run.metrics.get("val/acc", [])]
    return f"{max(values):.2%}, the best of {len(values)}" if len(values) > 1 else None


def _extent(run: RunContents) -> str | None:
    """How long the run has trained: epochs that are complete, and steps."""
    if not run.trained:
        return None
    last = max(logged[-1][0] for name, logged in run.metrics.items() if name.startswith("train/"))
    epochs = f"{_count(len(run.epochs), 'epoch')}, " if run.epochs else ""
    return f"{epochs}{_count(last + 1, 'step')}"


def _throughput(run: RunContents) -> str | None:
    values = [value for _, value in run.metrics.get(THROUGHPUT, [])]
    return f"{statistics.median(values):,.0f}, the median of {len(values)}" if values else None


def _network(settings: Mapping[str, str]) -> str | None:
    if settings.get("model.network", "null") != "null":
        return settings["model.network"]
    stem = settings.get("model.stem", "null")
    return settings.get("model.arch", NOTHING) + ("" if stem == "null" else f", {stem} stem")


def _hardware(about: Mapping[str, Any]) -> str:
    if about["device"] == "cuda" and about["gpus"]:
        return f"{len(about['gpus'])} x {about['gpus'][0]}"
    return f"{about['cpu'].get('model')}, {_count(about['cpu'].get('cores', 0), 'core')}"


def _commit(about: Mapping[str, Any]) -> str | None:
    git = about["git"]
    return f"{git['commit'][:12]}{', modified' if git.get('modified') else ''}" if git else None


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def settings_that_differ(runs: Runs) -> Markup | None:
    """The flags in which the runs differ; None for one run."""
    if len(runs) == 1:
        return None
    rows = different_settings(list(runs.values()))
    if not rows:
        return element("p", "None: the runs have the same settings.")
    cells = [
        [element("code", f"--{key}"), *(NOTHING if value is None else element("code", value) for value in values)]
        for key, values in rows.items()
    ]
    return table(["", *_heads(runs)], cells)


def samples(runs: Runs) -> Markup | None:
    """The digest of the samples of each run that has trained; None if there is none."""
    trained = [(place, name, run.epochs[-1]) for place, (name, run) in enumerate(runs.items()) if run.epochs]
    rows = [
        [run_name(place, name), f"{epoch.number + 1}", f"{epoch.samples:,}", element("code", epoch.digest)]
        for place, name, epoch in trained
    ]
    digests = {(epoch.number, epoch.digest) for _, _, epoch in trained}
    verdict = element("p", "All runs used the same samples.") if len(digests) == 1 < len(trained) else None
    head = ["run", "epochs", "samples in the last", "digest after the last"]
    return joined(verdict, table(head, rows)) if rows else None


def repeat(runs: Runs) -> Markup:
    """The commands that repeat each run, and what was typed to start it."""
    return joined(*(_repeat(place, name, run) for place, (name, run) in enumerate(runs.items())))


def _repeat(place: int, name: str, run: RunContents) -> Markup:
    parts = [element("h3", run_name(place, name))]
    command = repeat_command(run)
    if command is not None:
        parts.append(element("pre", element("code", command), tabindex=0))
    typed = element("pre", element("code", run.environment["command"]), tabindex=0)
    return element("div", *parts, element("p", "It was started by"), typed)


def command_of(run: RunContents) -> str | None:
    """Which of `fit`, `validate` and `test` the run is; None if another program has started it."""
    return next((word for word in _words(run) if word in _COMMANDS), None)


def repeat_command(run: RunContents) -> str | None:
    """What to type to do the run again, from its `config.yaml`; None if another program has started it.

    The file names neither the checkpoint that a fit began with, nor a number of devices that was left to the machine.
    """
    command, about, words = command_of(run), run.environment, _words(run)
    if command is None:
        return None
    flags = [f"--config {shown(run.folder / 'config.yaml')}"]
    if run.settings.get("trainer.devices") == "auto" and about["world_size"] > 1 == about.get("num_nodes"):
        flags.append(f"--trainer.devices={about['world_size']}")
    for index, word in enumerate(words):
        if command == "fit" and word.partition("=")[0] == "--ckpt_path":
            flags.append(shlex.join(words[index : index + (1 if "=" in word else 2)]))
    checkout = f"git checkout {about['git']['commit']}\n" if about["git"] else ""
    return f"{checkout}python -m lit_cifar {command} {' '.join(flags)}"


def _words(run: RunContents) -> list[str]:
    """The command that was typed, in words; none where the name of a program has a quotation mark."""
    try:
        return shlex.split(run.environment["command"])
    except ValueError:
        return []
