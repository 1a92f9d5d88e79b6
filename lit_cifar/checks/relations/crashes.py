"""Why a run ended without a result: where in the user's code, by what, and what to type."""

import shlex
from pathlib import Path
from time import time
from traceback import extract_tb, format_exception_only

from lit_cifar.checks.relations.plan import End, Target
from lit_cifar.errors import printable

_LONGEST = 200  # characters of an error
# No other way to run the script mends these.
_FINAL = {"EOFError", "FileNotFoundError", "ImportError", "SyntaxError"}


def note_error(end: End, error: BaseException, place: Path) -> None:
    """Note an error of a training whose files are in the mirror `place`."""
    (*_, said) = format_exception_only(error)
    end.error = printable((said.strip().splitlines() or [""])[0].replace(str(place), ""))
    end.kinds = [kind.__name__ for kind in type(error).__mro__]
    end.at = time()
    frames = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((str(error.filename), error.lineno))
    own = [f"{file}:{line}" for file, line in frames if file.startswith(f"{place}/")]
    end.where = printable(own[-1].removeprefix(str(place))) if own else ""


def in_words(end: End, target: Target, ranks: int) -> str:
    """How a run of so many processes ended."""
    on = f" on {ranks} processes" if ranks > 1 else ""
    at = f" at {end.where.removeprefix(f'{target.folder}/')}" if end.where else ""
    return f"a run{on} ended{at} by {end.error[:_LONGEST]}"


def is_final(end: End) -> bool:
    """Whether the training would end so in whatever precision, and on any number of processes."""
    was_refused = bool(end.outside) and "PermissionError" in end.kinds
    return was_refused or not _FINAL.isdisjoint(end.kinds)


def remedy(end: End, target: Target) -> str:
    """What to do about it, as a sentence or command."""
    if end.outside:
        return elsewhere(end, target)
    if end.asks:
        return "it reads its standard input, where nobody answers: give the answer by an argument, behind a --"
    if "ImportError" in end.kinds:
        return "install it in the environment of this command"
    if "FileNotFoundError" in end.kinds:
        return "start this command in the folder in which you start the script"
    if "SystemExit" in end.kinds:
        return "arguments of the script follow a --"
    words = ["python", *(["-m"] if target.is_module else []), target.program, *target.arguments]
    return f"see whether it ends so by itself: {shlex.join(words)}"


def elsewhere(end: End, target: Target) -> str:
    """Names the first folder that a run may not write to."""
    where = f"below {target.folder}, such as by an argument behind a --"
    return f"runs would share {printable(end.outside[0])}, so nothing is written there: let the script write {where}"
