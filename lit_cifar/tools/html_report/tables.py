"""What the tables of the page say: what runs are called, are and reached, in what they differ, how to repeat them."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_cifar.errors import ConfigError, printable
from lit_cifar.reporting.progress import METRIC as THROUGHPUT
from lit_cifar.reporting.rank_statistics import pooled
from lit_cifar.reporting.run_report import counted, shown
from lit_cifar.tools.html_report.run_reader import RunContents

Runs = Mapping[str, RunContents]
_COMMANDS = ("fit", "validate", "test")


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders as they were typed.

    Raises:
        ConfigError: A folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ConfigError(f"the run folder {folders[index]} is given twice", remedy="name it once")
    return [printable(str(folder)) for folder in folders]


def check_comparable(runs: Runs) -> None:
    """Find out whether the runs have the same data set.

    Raises:
        ConfigError: They have different ones.
    """
    first, *others = runs
    for name in others:
        for what, one, other in zip(("data", "classes"), _data_of(runs[first]), _data_of(runs[name]), strict=True):
            if one and other and one != other:
                raise ConfigError(
                    f"the runs have different {what}, and cannot be compared:\n{first} has {one}\n{name} has {other}",
                    remedy="make a page for each",
                )


def _data_of(run: RunContents) -> tuple[str, str]:
    """The title of the data set, and its classes where they are known."""
    classes = [confusion.classes for confusion in run.confusion.values()]
    return run.environment["data"], ", ".join(classes[0]) if classes else ""


def different_settings(runs: Sequence[RunContents]) -> dict[str, list[str | None]]:
    """The flags in which the runs differ, each with the value of every run, None where a run has no such flag.

    A whole part of the configuration that some run lacks is left out: `test` has no flags for checkpoints.
    """
    parts = set.intersection(*({key.partition(".")[0] for key in run.settings} for run in runs))
    keys = dict.fromkeys(key for run in runs for key in run.settings if key.partition(".")[0] in parts)
    rows = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def summary(runs: Runs) -> dict[str, list[str | None]]:
    """What each run is, and what it has reached; facts that no run has are left out."""
    facts = [_facts(run) for run in runs.values()]
    return {name: [fact[name] for fact in facts] for name in facts[0] if any(fact[name] for fact in facts)}


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
        "mode": f"{about['strategy']}, {counted(about['world_size'], 'process', 'processes')}, {about['precision']}",
        "global batch": settings.get("data.batch_size"),
        "hardware": _hardware(about),
        "torch": about["versions"].get("torch"),
        "commit": _commit(about),
        "started": about["started"].replace("T", " ").replace("+00:00", " UTC"),
    }


def _accuracy(run: RunContents, split: str) -> str | None:
    count = pooled(run.ranks.get(split, []))
    if not count.total:
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
    epochs = f"{counted(len(run.epochs), 'epoch')}, " if run.epochs else ""
    return f"{epochs}{counted(last + 1, 'step')}"


def _throughput(run: RunContents) -> str | None:
    values = [value for _, value in run.metrics.get(THROUGHPUT, [])]
    return f"{statistics.median(values):,.0f}, the median of {len(values)}" if values else None


def _network(settings: Mapping[str, str]) -> str | None:
    if settings.get("model.network", "null") != "null":
        return settings["model.network"]
    stem = settings.get("model.stem", "null")
    arch = settings.get("model.arch")
    return arch if arch is None or stem == "null" else f"{arch}, {stem} stem"


def _hardware(about: Mapping[str, Any]) -> str:
    if about["device"] == "cuda" and about["gpus"]:
        return f"{len(about['gpus'])} x {about['gpus'][0]}"
    return f"{about['cpu'].get('model')}, {counted(about['cpu'].get('cores', 0), 'core')}"


def _commit(about: Mapping[str, Any]) -> str | None:
    git = about["git"]
    return f"{git['commit'][:12]}{', modified' if git.get('modified') else ''}" if git else None


def same_samples(runs: Runs) -> bool:
    """Whether several runs have trained, all of them on the same samples."""
    last = [(run.epochs[-1].number, run.epochs[-1].digest) for run in runs.values() if run.epochs]
    return len(set(last)) == 1 < len(last)


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
