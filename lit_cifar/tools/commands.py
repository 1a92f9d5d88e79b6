"""Commands beside Lightning's fit, validate, test and predict: they start processes of their own, or none."""

from importlib import import_module

# The module of each, whose `main` takes what follows the name on the command line and returns the exit status.
COMMANDS = {
    "doctor": "doctor",
    "ray": "ray",
    "relations": "relations",
    "verify": "verify.command",
}


def run(name: str, words: list[str]) -> int:
    """Run a command, whose import takes the others some tenths of a second."""
    return int(import_module(f"lit_cifar.tools.{COMMANDS[name]}").main(words))
