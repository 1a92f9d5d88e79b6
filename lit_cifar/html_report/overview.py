"""The tables of the page: what the runs are and reached, in what they differ, their samples, how to repeat them."""

import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from lit_cifar.html_report.charts import marker
from lit_cifar.html_report.comparison import different_settings
from lit_cifar.html_report.markup import Child, Markup, element, joined
from lit_cifar.html_report.run import Run
from lit_cifar.reporting.run_report import shown
from lit_cifar.reporting.throughput import METRIC as THROUGHPUT

NOTHING = "\N{EN DASH}"
_COMMANDS = ("fit", "validate", "test")


def table(head: Sequence[Child], rows: Sequence[Sequence[Child]], *, class_: str | None = None) -> Markup:
    """A table that scrolls in a container of its own; the first cell of a row is its name."""
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in rest))
        for first, *rest in rows
    ]
    columns = [element("th", cell, scope="col") for cell in head]
    content = element("table", element("thead", element("tr", *columns)), element("tbody", *body), class_=class_)
    return element("div", content, class_="scroll", tabindex=0)


def run_heads(names: Sequence[str]) -> list[Markup]:
    """Each run's name behind its marker."""
    return [element("span", swatch(look), name, class_="run") for look, name in enumerate(names)]


def swatch(look: int) -> Markup:
    """A run's marker, as part of a text."""
    return element("svg", marker(look, 6, 6), viewBox="0 0 12 12", class_="swatch", aria_hidden="true")


def runs_table(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    """What each run is, and what it has reached; facts that no run has are left out."""
    facts = [_facts(run) for run in runs]
    rows = [[name, *(fact[name] or NOTHING for fact in facts)] for name in facts[0]]
    return table(["", *run_heads(names)], [row for row in rows if set(row[1:]) != {NOTHING}], class_="facts")


def _facts(run: Run) -> dict[str, str | None]:
    about, settings = run.environment, run.settings
    return {
        "command": command_of(run),
        "test accuracy": _accuracy(run, "test"),
        "validation accuracy": _accuracy(run, "val"),
        "best validation": _best(run),
        "training loss": None if (loss := run.last("train/loss")) is None else f"{loss:.4f}",
        "training": _extent(run),
        "images per second": _throughput(run),
        "network": settings.get("model.arch", "null").replace("null", settings.get("model.network", NOTHING)),
        "mode": f"{about['strategy']}, {_count(about['world_size'], 'process')}, {about.get('precision', NOTHING)}",
        "global batch": settings.get("data.batch_size"),
        "hardware": _hardware(about),
        "torch": str(about["versions"].get("torch", NOTHING)),
        "commit": _commit(about),
        "started": str(about["started"]).replace("T", " ").replace("+00:00", " UTC"),
    }


def _accuracy(run: Run, split: str) -> str | None:
    count = run.count(split)
    if count is None or not count.total:
        return None
    low, high = count.interval()
    return f"{count.accuracy:.2%} of {count.total:,} ({low:.1%} to {high:.1%})"


def _best(run: Run) -> str | None:
    logged = run.metrics.get("val/acc", [])
    return f"{max(value for _, value in logged):.2%}, the best of {len(logged)}" if len(logged) > 1 else None


def _extent(run: Run) -> str | None:
    steps = [logged[-1][0] + 1 for name, logged in run.metrics.items() if name.startswith("train/")]
    if not steps:
        return None
    epochs = f"{_count(len(run.epochs), 'epoch')}, " if run.epochs else ""
    return f"{epochs}{_count(max(steps), 'step')}"


def _throughput(run: Run) -> str | None:
    values = [value for _, value in run.metrics.get(THROUGHPUT, [])]
    return f"{statistics.median(values):,.0f}, median of {len(values)}" if values else None


def _hardware(about: dict[str, Any]) -> str:
    if about["device"] == "cuda" and about["gpus"]:
        return f"{len(about['gpus'])} x {about['gpus'][0]}"
    return f"{about['cpu'].get('model', 'CPU')}, {about['cpu'].get('cores', '?')} cores"


def _commit(about: dict[str, Any]) -> str | None:
    git = about["git"]
    return f"{git['commit'][:12]}{', modified' if git.get('modified') else ''}" if git else None


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{'' if number == 1 else plural}"


def settings_table(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """The flags in which the runs differ; None for one run."""
    if len(runs) == 1:
        return None
    rows = different_settings(runs)
    if not rows:
        return element("p", "The runs have the same settings.")
    cells = [
        [element("code", f"--{key}"), *(NOTHING if value is None else element("code", value) for value in values)]
        for key, values in rows.items()
    ]
    return table(["", *run_heads(names)], cells)


def samples_table(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """The digest of the samples of each run that has trained; None if there is none."""
    trained = [(look, run) for look, run in enumerate(runs) if run.epochs]
    if not trained:
        return None
    rows = [
        [
            element("span", swatch(look), names[look], class_="run"),
            f"{len(run.epochs)}",
            f"{run.epochs[-1].samples:,}",
            element("code", run.epochs[-1].digest),
        ]
        for look, run in trained
    ]
    groups = {(run.epochs[-1].number, run.epochs[-1].digest) for _, run in trained}
    verdict = "All used the same samples in the same steps." if len(groups) == 1 < len(trained) else None
    head = ["run", "epochs", "samples in the last", "digest after the last"]
    return joined(None if verdict is None else element("p", verdict), table(head, rows))


def repeat_commands(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    """The commands that repeat each run, and what was typed to start it."""
    return joined(*(_repeat(run, look, name) for look, (run, name) in enumerate(zip(runs, names, strict=True))))


def _repeat(run: Run, look: int, name: str) -> Markup:
    command = repeat_command(run)
    typed = element("p", "It was started with ", element("code", str(run.environment["command"])))
    shown_command = None if command is None else element("pre", element("code", command), tabindex=0)
    return element("div", element("h3", swatch(look), name), shown_command, typed)


def command_of(run: Run) -> str | None:
    """Which of `fit`, `validate` and `test` the run is; None if another program has started it."""
    words = shlex.split(str(run.environment["command"]))
    return next((word for word in words if word in _COMMANDS), None)


def repeat_command(run: Run) -> str | None:
    """What to type to do the run again, from its `config.yaml`; None if another program has started it.

    The file has every setting but the checkpoint that a fit began with, and names no number of devices where it was
    left to the machine.
    """
    command = command_of(run)
    if command is None:
        return None
    about, words = run.environment, shlex.split(str(run.environment["command"]))
    flags = [f"--config {shown(run.folder / 'config.yaml')}"]
    if run.settings.get("trainer.devices") == "auto" and about["world_size"] > 1 == about.get("num_nodes", 1):
        flags.append(f"--trainer.devices={about['world_size']}")
    for index, word in enumerate(words):
        if command == "fit" and word.startswith("--ckpt_path"):
            flags.append(shlex.join(words[index : index + 1 + ("=" not in word)]))
    checkout = "" if not about["git"] else f"git checkout {about['git']['commit']}\n"
    return f"{checkout}python -m lit_cifar {command} {' '.join(flags)}"
