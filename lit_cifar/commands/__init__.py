"""Commands beside Lightning's fit, validate, test and predict: they start processes of their own, or none."""

from collections.abc import Callable

from lit_cifar.commands.bench import main as bench
from lit_cifar.commands.chaos import main as chaos
from lit_cifar.commands.doctor import main as doctor
from lit_cifar.commands.export import main as export
from lit_cifar.commands.modes import main as modes
from lit_cifar.commands.report import main as report
from lit_cifar.commands.verify import main as verify

# Each takes what follows its name on the command line and returns the exit status.
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "bench": bench,
    "chaos": chaos,
    "export": export,
    "doctor": doctor,
    "modes": modes,
    "report": report,
    "verify": verify,
}
