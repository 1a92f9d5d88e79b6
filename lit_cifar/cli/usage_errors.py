"""Reports of a user's mistake on the command line: at most five lines, and exit status 2."""

import signal
import sys
from argparse import SUPPRESS, _HelpAction
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_cifar.cli.overview import PROGRAM
from lit_cifar.errors import ConfigError, SaveError, one_line, printable
from lit_cifar.reporting.run_folder import process_rank

_RAISED = (ArithmeticError, ImportError, MemoryError, MisconfigurationException, RuntimeError, TypeError, ValueError)
_MAX_LINES = 5  # of a report
_SETTINGS_REMEDY = "write settings as in RUN/config.yaml"


class HelpAction(_HelpAction):
    """`--help` shows the commands, or the common flags of one; `--help=all` shows every flag."""

    def __init__(self, option_strings: list[str], dest: str = SUPPRESS, default: str = SUPPRESS, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, default, **kwargs)
        self.nargs, self.metavar, self.choices = "?", "all", ["all"]

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from lit_cifar.cli.help import help_of

        print(help_of(parser, everything=values == "all"))
        parser.exit()


class Parser(LightningArgumentParser):
    """Reports what is wrong in a few lines, not the three hundred options that exist."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, add_help=False, **kwargs)
        self.subcommand: str | None = None  # the command whose flags it knows
        self.words: Sequence[str] = ()  # the command line
        self.add_argument("-h", "--help", action=HelpAction, help="Print this help, or all of it, and exit.")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        from lit_cifar.cli.explanations import explained
        from lit_cifar.cli.gone import refuse_words

        refuse_words(self.words)
        commands = [action.choices.values() for action in self._actions if isinstance(action.choices, dict)]
        known = [flag for parser in chain([self], *commands) for flag in parser._option_string_actions]
        problem, remedy = explained(message, known=known, program=_program())
        refuse(problem, remedy=remedy)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a file like jsonargparse, with a short error if it is a pipe, which can be read once, or not text."""
        if Path(path).is_fifo():
            problem = f"--config={path} is a pipe, which cannot be read by several processes"
            raise ConfigError(problem, remedy="write the settings to a file: --config=FILE")
        try:
            return super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            raise ConfigError(f"--config={path} is not text: {error}", remedy="pass a YAML file") from error

    def parse_string(self, content: str, path: Any = "", *args: Any, **kwargs: Any) -> Any:
        """Parse settings like jsonargparse; a `ConfigError` if they are no YAML, there are none, or one is there twice.

        Of two the first would not count. Each section must have settings, which all lines that are comments are not.
        """
        try:
            root = yaml.compose(content, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--config={path}: {one_line(error)}", remedy=_SETTINGS_REMEDY) from error
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"--config={path} holds no settings", remedy=_SETTINGS_REMEDY)
        names = [action.dest.split(".") for action in self._actions if not action.dest.endswith(".help")]
        sections = {".".join(name[:depth]) for name in names for depth in range(1, len(name))}
        _check(root, "", sections, path)
        return super().parse_string(content, path, *args, **kwargs)


def _check(mapping: yaml.MappingNode, prefix: str, sections: Set[str], file: str) -> None:
    seen = set()
    for key, value in mapping.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"--config={file} holds {name} again in line {line}", remedy="leave one of the two out")
        seen.add(name)
        if name in sections and isinstance(value, yaml.MappingNode):
            _check(value, f"{name}.", sections, file)
        elif name in sections and value.tag != "tag:yaml.org,2002:str":  # which may name a file
            raise ConfigError(f"--config={file} has no settings of {name} in line {line}", remedy=_SETTINGS_REMEDY)


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turn what a class raises into a `ConfigError`: the user has chosen the class or its arguments."""
    try:
        yield
    except ConfigError:
        raise
    except _RAISED as error:
        explained = isinstance(error, ImportError | MisconfigurationException | ValueError)
        problem, remedy = str(error) if explained else f"{type(error).__name__}: {error}", f"see {_program()} --help"
        if "invalid strategy name" in str(error):
            from lit_cifar.cli.explanations import of_strategy_name

            problem, remedy = of_strategy_name(str(error))
        raise ConfigError(problem, remedy=remedy) from error


@contextmanager
def cli_exit() -> Iterator[None]:
    """End the program with the words of a `ConfigError`: with status 2, or 1 if a file could not be saved.

    What Lightning refuses after the run has begun ends it with status 2 too, and Ctrl-C with 130: nothing has failed.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        if not any(isinstance(error, KeyboardInterrupt) for error in (end, end.__context__)):  # Lightning replaces it
            raise
        if process_rank() == 0:
            print("lit_cifar: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGINT) from None
    except ConfigError as error:
        refuse(str(error), status=1 if isinstance(error, SaveError) else 2)
    except (MisconfigurationException, RuntimeError) as error:
        known = ("Early stopping conditioned on metric", "The current optimizer")  # whose fused kernel cannot clip
        if isinstance(error, RuntimeError) and not str(error).startswith(known):
            raise
        refuse(str(error), remedy=f"see {_program()} --help")


def refuse(message: str, *, remedy: str | None = None, status: int = 2) -> NoReturn:
    """Print `message`, and `remedy` below it, in at most five lines on stderr, and exit with `status`."""
    rank = f"[rank {process_rank()}] " if process_rank() else ""
    lines = [line.strip()[:300] for line in printable(message, lines=True).split("\n") if line.strip()]
    last = [] if remedy is None else [printable(remedy, lines=True)]
    shown = lines[: _MAX_LINES - len(last)] + last
    print(f"{rank}lit_cifar: error: " + "\n  ".join(shown), file=sys.stderr, flush=True)
    raise SystemExit(status)


def _program() -> str:
    """The command whose help lists the options."""
    return " ".join([PROGRAM, *(word for word in sys.argv[1:2] if word in LightningCLI.subcommands())])
