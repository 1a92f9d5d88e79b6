"""Common parts of the commands: options, printed lines and tables, a record on disk, clean exits on signals."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Column, Table

from lit_cifar.errors import ConfigError
from lit_cifar.launch.signals import stop_signals
from lit_cifar.reporting.environment import about as about  # for the records of commands

say = partial(print, flush=True)  # flushed, also into a pipe


class CommandParser(argparse.ArgumentParser):
    """Options of `python -m lit_cifar NAME`; it raises a `ConfigError` for options that cannot work."""

    def __init__(self, name: str, *, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=f"python -m lit_cifar {name}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy=f"see {self.prog} --help")


def whole(text: str, *, fewest: int = 0) -> int:
    """A whole number from `fewest`, for an option."""
    if not text.isdecimal() or int(text) < fewest:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {fewest}")
    return int(text)


positive = partial(whole, fewest=1)


def refuse_owned(args: Iterable[str], owned: Collection[str], *, command: str) -> None:
    """Raise a `ConfigError` if arguments for `fit` contain a flag that the command sets itself."""
    for name in (arg.partition("=")[0].removeprefix("--") for arg in args):
        if name in owned:
            raise ConfigError(f"{command} sets --{name} itself", remedy=f"see python -m lit_cifar {command} --help")


def console() -> Console:
    """A console for tables: as wide as the terminal, or 120 columns without one."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def table(title: str, columns: Sequence[str | Column] = (), *, numbers: Sequence[str] = ()) -> Table:
    """An empty table; columns of numbers, right of the other columns, are never wrapped."""
    columns = [*columns, *(Column(name, justify="right", no_wrap=True) for name in numbers)]
    return Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")


def exit_orderly_when_terminated() -> None:
    """Turn SIGTERM and SIGHUP into an exception, so that runs are ended and folders removed, as by Ctrl-C."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    with suppress(ValueError):  # outside of the main thread the caller handles signals
        for number in {*stop_signals()} - {signal.SIGINT}:
            signal.signal(number, leave)


def writable(name: str | None) -> Path | None:
    """The file that --json names, if it is given, checked to be writable now and not only at the end."""
    if name is None:
        return None
    path = Path(os.path.expanduser(name))  # noqa: PTH111  # which leaves a user that is unknown
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json={path} cannot be written", remedy="choose another file")
    return path


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        valid = json.loads(json.dumps(content), parse_constant=str)  # JSON has "Infinity" as text alone
        file.write_text(json.dumps(valid, indent=2) + "\n")
