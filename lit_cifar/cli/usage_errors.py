"""Reports of a user's mistake on the command line: at most five lines, and exit status 2."""

import inspect
import re
import shlex
import signal
import sys
from argparse import SUPPRESS, _HelpAction
from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_cifar.cli.gone import refuse_settings
from lit_cifar.errors import ConfigError, SaveError, nearest, printable
from lit_cifar.reporting.run_folder import process_rank
from lit_cifar.tools.commands import COMMANDS

PROGRAM = "python -m lit_cifar"
_MAX_LINES = 5
_ARGUMENT_OF_NAME = re.compile(  # a part of jsonargparse's message
    r"""key "trainer\.strategy":.* import path string: (\S+)\n.*NestedArg\(key='(.+?)', val=(.*)\)""",
    flags=re.DOTALL,
)

# The base of the classes that an option takes, and types in words.
_BASES: dict[str, type[Any]] = {
    "model.optimizer": Optimizer,
    "model.lr_scheduler": LRScheduler,
    "trainer.callbacks": Callback,
    "trainer.logger": Logger,
}
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    "datetime.timedelta": "a duration, as 0:10:00",
    "lit_cifar.data.options.Augment": "settings",
}


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

    def __init__(self, *args: Any, version: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, add_help=False, **kwargs)
        self.subcommand: str | None = None  # the command whose flags it knows
        self.add_argument("-h", "--help", action=HelpAction, help="Print this help, or all of it, and exit.")
        if version is not None:  # jsonargparse would print the program's name, which is a command here
            self.add_argument("--version", action="version", version=f"lit_cifar {version}", help="Print and exit.")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        _refuse_arguments_of_name(message)
        problem, guess = _explained(_without_alternatives(message))
        if found := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            # Options are long and begin alike, so the cutoff is higher than for single words.
            near = get_close_matches(found[1], self._option_string_actions, n=1, cutoff=0.75)
            guess = near[0] if near else None
        guess = _open_argument(problem) or guess
        help = f"see {_program()} --help"
        refuse(problem, remedy=help if guess is None else f"did you mean {guess}? {help}")

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a file like jsonargparse, with a short error if it is not text."""
        try:
            return super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--config={path} is not text: {error}", remedy="pass a YAML file, e.g. --config=RUN/config.yaml"
            ) from error

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Any:
        """Parse the settings of a file like jsonargparse, with a short error for those that have gone."""
        refuse_settings(content)
        return super().parse_string(content, *args, **kwargs)


def check_command(words: Sequence[str]) -> None:
    """Refuse `words` if the first is neither one of Lightning's commands and ours nor an option."""
    known = [*LightningCLI.subcommands(), *COMMANDS]
    if words and (words[0] in known or words[0].startswith("-")):
        return
    problem = f"there is no command {words[0]}" if words else "a command is missing"
    raise ConfigError(f"{problem}; choose from {', '.join(known)}", remedy=f"see {PROGRAM} --help")


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turn what a class raises into a `ConfigError`: the user has chosen the class or its arguments."""
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, ImportError, MemoryError, MisconfigurationException, RuntimeError, ValueError) as error:
        raise _config_error_of(error) from error


def _config_error_of(error: Exception) -> ConfigError:
    """An error of Lightning or torch about an argument, with our remedy where we know one."""
    if "invalid strategy name" in str(error):
        from lit_cifar.mode.table import MODES

        modes = ["auto", *(mode.name for mode in MODES if mode.name != "single")]
        problem = str(error).split(". ")[0]
        given = problem.split("'")[-2]
        alike = [name for name in modes if len(name) == len(given)]  # one wrong letter is likelier than one too many
        meant = nearest(given, alike) or nearest(given, [*modes, *_subclasses(Strategy)])
        guess = "" if meant is None else f"did you mean --trainer.strategy={meant}? "
        return ConfigError(problem, remedy=f"{guess}the modes: {', '.join(modes)}")
    explained = isinstance(error, ImportError | MisconfigurationException | ValueError)
    problem = str(error) if explained else f"{type(error).__name__}: {error}"
    return ConfigError(problem, remedy=f"see {_program()} --help")


@contextmanager
def cli_exit() -> Iterator[None]:
    """End the program with the words of a `ConfigError`: with status 2, or 1 if a file could not be saved.

    What Lightning refuses only after the run has begun ends it with status 2 too, and Ctrl-C with 130, because nothing
    has failed.
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
        if isinstance(error, RuntimeError) and not str(error).startswith("Early stopping conditioned on metric"):
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


def _refuse_arguments_of_name(message: str) -> None:
    """Exit if `message` is about an argument of a strategy that was given by its short name."""
    found = _ARGUMENT_OF_NAME.search(message)
    if found is None:
        return
    name, key, value = found.groups()
    strategy, arguments = "CLASS", {key: value.strip("'\"")}
    if name in StrategyRegistry:
        strategy = StrategyRegistry[name]["strategy"].__name__
        arguments = StrategyRegistry[name]["init_params"] | arguments
    flags = [f"--trainer.strategy.{key}={'null' if value is None else value}" for key, value in arguments.items()]
    refuse(
        f"--trainer.strategy={name} is a short name, which takes no arguments; a class takes them",
        remedy=f"use {shlex.join([f'--trainer.strategy={strategy}', *flags])}",
    )


def _open_argument(message: str) -> str | None:
    """The flag that may be meant by one that a class does not have.

    What a function takes by `**kwargs` has another flag, as jsonargparse cannot see which arguments there are.
    """
    found = re.search(r"key \"(\S+?)\": '(\S+?)':.*Option '(\w+)' is not accepted", message, flags=re.DOTALL)
    if found is None:
        return None
    parameters = inspect.signature(resolve_name(found[2])).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if takes_any:
        return f"--{found[1]}.dict_kwargs.{found[3]}"
    meant = nearest(found[3], [parameter.name for parameter in parameters])
    return None if meant is None else f"--{found[1]}.{meant}"


def _without_alternatives(message: str) -> str:
    """A message about an option of several types, reduced to the type that was meant."""
    key, _, rest = message.partition("\n")
    _, found, meant = rest.partition("- Problem with given class_path ")
    return f"{key} {meant.rpartition('Given value type')[0]}" if found else message


def _explained(message: str) -> tuple[str, str | None]:
    """A message of jsonargparse about a value, in one line, and what may have been meant; others unchanged."""
    keys = re.findall(r'Parser key "(.+?)"', message)
    flag = f"--{'.'.join(keys)}"
    missing = re.search(r"import path string: (\S+)|has no attribute '\w+'\. Got value: (\S+)", message)
    if keys and missing and "data.augment" not in keys:  # whose class has no other one in its place
        name = missing[1] or missing[2]
        meant = nearest(name.rpartition(".")[2], _subclasses(_BASES.get(keys[-1], type(None))))
        return f"{flag}={name}: there is no such class", None if meant is None else f"{flag}={meant}"
    given = re.search(r"(?:Got|Given) value: (.*?)(?:\. Got value|$)", message, flags=re.MULTILINE)
    union = re.search(r"Subtypes: (.*)", message)
    kinds = re.findall(r"<class '(.+?)'>|typing\.Literal(\[.*?\])", union[1] if union else message)
    if not (keys and given and kinds) or "is not accepted" in message:
        return message, None
    words = [str(word) for _, choices in kinds if choices for word in literal_eval(choices)]
    allowed = [*(_TYPES.get(kind, kind) for kind, _ in kinds if kind not in ("", "NoneType")), *words]
    allowed += ["null"] if ("NoneType", "") in kinds else []
    *most, last = dict.fromkeys(allowed)
    meant = nearest(given[1], words)
    problem = f"{flag}={given[1]} must be {', '.join(most)}{' or ' if most else ''}{last}"
    return problem, None if meant is None else f"{flag}={meant}"


def _subclasses(base: type[Any]) -> list[str]:
    """The names of all known subclasses that are public."""
    children: list[type[Any]] = base.__subclasses__()
    below = [name for child in children for name in (child.__name__, *_subclasses(child))]
    return [name for name in below if not name.startswith("_")]


def _program() -> str:
    """The command whose help lists the options."""
    return " ".join([PROGRAM, *(word for word in sys.argv[1:2] if word in LightningCLI.subcommands())])
