"""What is answered before the imports that take seconds: the overview, the version, and a command that there is not."""

import os
import re
import sys
from collections.abc import Sequence

from lit_cifar.errors import nearest, printable
from lit_cifar.launch.startup import RANKS
from lit_cifar.version import __version__

PROGRAM = "python -m lit_cifar"
SUBCOMMANDS = {
    "fit": "Train a network.",
    "validate": "Evaluate a checkpoint on the validation images.",
    "test": "Evaluate a checkpoint on the test images.",
    "predict": "Classify the images of a folder with a checkpoint.",
}
# All commands, as `--help` groups them.
_COMMANDS = {
    "train": {**SUBCOMMANDS, "ray": "Train over the nodes of a Ray cluster, in any mode."},
    "check": {
        "verify": "Compare modes with the one device that each must equal.",
        "relations": "Run your own script in pairs that must train the same model.",
        "doctor": "Which modes run on this machine, how to start them, and whether it is fit to.",
    },
}
_COUNTS = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NTASKS"]
_COUNTS += ["SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NODEID"]
_EXAMPLES = (
    "fit --data.root=data --trainer.strategy=ddp --trainer.devices=2",
    "test runs/FOLDER",
    "verify --modes=ddp,pp --devices=2",
)


def answer(words: Sequence[str]) -> None:
    """Exit if `words` ask for no more than this file has, or name no command; with status 2 if they cannot work."""
    first, *rest = words or [""]
    if first == "--version":
        print(f"lit_cifar {__version__}")
        raise SystemExit(0)
    if list(words) in (["-h"], ["--help"]):
        print(overview(PROGRAM))
        raise SystemExit(0)
    for name in (*RANKS, *_COUNTS):
        if not os.environ.get(name, "0").isdecimal():
            kind = "rank" if name in RANKS else "number"
            _refuse(f"{name}={os.environ[name]!r} in the environment is not a {kind}", f"unset {name}")
    known = [name for group in _COMMANDS.values() for name in group]
    command = next((word for word in rest if word in known), "")
    if command and re.match(r"--(?!help)|-c", first):
        _refuse(f"{first} stands before the command", f"flags follow it: {PROGRAM} {command} --FLAG=VALUE ...")
    if first in known or first.startswith("-"):
        return
    from lit_cifar.cli import gone

    if first in gone.INSTEAD:
        _refuse(f"the command {first} has gone", f"instead: {gone.INSTEAD[first]}")
    problem = f"there is no command {first}" if words else "a command is missing"
    meant = nearest(first, known) or next(iter(_COMMANDS.get(first, ())), None)  # a group has that name
    guess = f"did you mean {meant}? " if meant else ""
    _refuse(f"{problem}; choose from {', '.join(known)}", f"{guess}see {PROGRAM} --help")


def _refuse(problem: str, remedy: str) -> None:
    print(f"lit_cifar: error: {printable(problem)}\n  {remedy}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def overview(program: str) -> str:
    """All commands of `program`, in groups, and examples."""
    about = "Train image classifiers in ten modes of parallelism, and check that all train the same model."
    lines = [f"usage: {program} COMMAND [--FLAG=VALUE ...]", "", about]
    for group, commands in _COMMANDS.items():
        lines += ["", group, *(f"  {name:<10}{text}" for name, text in commands.items())]
    lines += ["", "examples", *(f"  {program} {example}" for example in _EXAMPLES)]
    return "\n".join([*lines, "", "Each command has a --help of its own. --version prints the version."])
