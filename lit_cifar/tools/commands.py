"""Commands beside Lightning's fit, validate, test and predict: they start processes of their own, or none."""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

_MODULES = {
    "doctor": "doctor.command",
    "modes": "doctor.modes",
    "ray": "ray",
    "relations": "relations",
    "verify": "verify.command",
}


def _run(module: str, words: list[str]) -> int:
    """Import the command's module, which takes the others some tenths of a second, and run it; 130 after Ctrl-C."""
    try:
        status: int = import_module(f"lit_cifar.tools.{module}").main(words)
    except KeyboardInterrupt:
        print("interrupted; every process was ended", file=sys.stderr)
        return 130
    return status


# Each takes what follows its name on the command line and returns the exit status.
COMMANDS: dict[str, Callable[[list[str]], int]] = {name: partial(_run, module) for name, module in _MODULES.items()}
