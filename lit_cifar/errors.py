"""Errors that users can fix, and deliberate early exits.

The message of a user's mistake says what was received, which rule it breaks and what to type instead. The command line
prints it without a traceback and exits with status 2 (see `lit_cifar.cli.main`).
"""

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from operator import eq
from typing import TypeVar

_Number = TypeVar("_Number", bound=float | None)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that a misspelt `word` may have meant."""
    spelt, word = {name.lower(): name for name in known}, word.lower()
    # One wrong letter is likelier than one too many, and a wrong one at the end than at the beginning.
    alike = get_close_matches(word, [name for name in spelt if len(name) == len(word)])
    found = [max(alike, key=lambda name: [*map(eq, name, word)])] if alike else get_close_matches(word, spelt, n=1)
    same = [name for name in spelt if re.sub(r"[\W_]", "", name) == re.sub(r"[\W_]", "", word)]
    found = same or found or [name for name in spelt if len(word) > 3 and name.startswith(word)]
    return spelt[found[0]] if found else None


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str, *, lines: bool = False) -> str:
    r"""`text` for any terminal and file: control characters and bytes that are not UTF-8 are spelt out, as in `\xe9`.

    Names of files and classes, and texts in a checkpoint, may come from anybody. With `lines`, line breaks are kept.
    """
    return "".join(char if char.isprintable() or (lines and char == "\n") else _spelt(char) for char in text)


def _spelt(char: str) -> str:
    # Python reads a byte that is not UTF-8 as one of 128 surrogates, whose low bits are the byte.
    return f"\\x{ord(char) & 0xFF:02x}" if "\ud800" <= char <= "\udfff" else ascii(char)[1:-1]


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work.

    The `problem` has the value received and the rule it broke, in a line or two, the `remedy` a flag or command.
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        super().__init__(f"{problem}\n{remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling with both fields: spawned processes send their exceptions to the parent."""
        return partial(type(self), remedy=self.remedy), (self.problem,)


def bounded(flag: str, value: _Number, least: float, most: float = math.inf, *, needed: bool = False) -> _Number:
    """`value`, the number given by `flag`, or None unless `needed`; a `ConfigError` if it is out of its bounds."""
    if needed if value is None else not least <= value <= most:
        rule = f"at least {least}" if most == math.inf else f"between {least} and {most}"
        remedy = f"pass {flag}={least if least >= 0 else 1}, or leave it out"
        raise ConfigError(f"{flag}={value} must be {rule}", remedy=remedy)
    return value


def clash(first: str, second: str, why: str) -> ConfigError:
    """The error that two settings contradict each other."""
    return ConfigError(f"{first} with {second}: {why}", remedy="leave out one of the two")


class DataError(ConfigError):
    """A data set that is missing, incomplete or damaged."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing, unreadable or of a different model."""

    def __init__(self, problem: str, *, remedy: str = "use another checkpoint") -> None:
        super().__init__(problem, remedy=remedy)


class SaveError(CheckpointError):
    """A checkpoint that could not be written. The user's command is right, so the exit status is 1."""


class Stopped(SystemExit):
    """Ends a run between two optimizer steps, when its processes have agreed on that and rank 0 has printed why.

    It is a `SystemExit`: no traceback is shown, and `code` becomes the exit status, even of a spawned process.
    """


class SampleAuditError(RuntimeError):
    """Training has lost samples, used some twice, or used some in a different step than planned.

    This is a defect and not a user's mistake, so the traceback is shown and the run exits with status 1.
    """


class ReplicaAuditError(RuntimeError):
    """Ranks that should hold the same weights do not.

    Memory, a processor or code is at fault and not what the user typed, so the traceback is shown.
    """
