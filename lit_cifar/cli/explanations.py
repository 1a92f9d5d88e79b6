"""What jsonargparse and Lightning say of an argument that they refuse, in few lines, with what may have been meant."""

import inspect
import os
import re
import shlex
import sys
from ast import literal_eval
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import StrategyRegistry
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_cifar.data.augment import Augment
from lit_cifar.errors import nearest
from lit_cifar.mode.table import MODES

# The base of the classes that an option takes, and types in words.
_BASES: dict[str, type[Any]] = {"model.optimizer": Optimizer, "model.lr_scheduler": LRScheduler}
_BASES |= {"trainer.callbacks": Callback, "trainer.logger": Logger}
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    "datetime.timedelta": "a duration, as 0:10:00",
    "lit_cifar.data.augment.Augment": "settings",
}
# The last word of a flag of other programs, and of ours.
_ELSEWHERE = dict.fromkeys(("gpu", "gpus", "num_gpus"), "devices") | dict.fromkeys(("fp16", "amp"), "precision")
_ELSEWHERE |= dict.fromkeys(("output_dir", "save_dir", "log_dir"), "run_dir") | {"learning_rate": "lr"}
_ELSEWHERE |= dict.fromkeys(("data_dir", "data_path", "path"), "root") | {"num_epochs": "max_epochs"}
_ELSEWHERE |= {"bs": "batch_size", "wd": "weight_decay", "scheduler": "lr_scheduler", "img_size": "image_size"}
_ELSEWHERE |= {"pretrained": "weights", "checkpoint": "ckpt_path", "clip_grad": "gradient_clip_val"}


def explained(message: str, *, known: Iterable[str], program: str) -> tuple[str, str]:
    """The problem of which jsonargparse's `message` is, and a remedy; `known` are the flags of `program`."""
    with_argument = r"""key "trainer\.strategy":.* import path string: (\S+)\n.*NestedArg\(key='(.+?)', val=(.*)\)"""
    if found := re.search(with_argument, message, flags=re.DOTALL):
        return _of_arguments_of_name(*found.groups())
    key, _, rest = message.partition("\n")  # of an option of several types only the one that was meant matters
    _, has_types, meant_type = rest.partition("- Problem with given class_path ")
    problem, guess = _of_value(f"{key} {meant_type.rpartition('Given value type')[0]}" if has_types else message)
    # Flags once one of their group, or of the default optimizer, is given.
    settings = [f"--data.augment.{field.name}" for field in fields(Augment)]
    settings += ["--model.optimizer.lr", "--model.optimizer.weight_decay"]
    if found := re.match(r"unrecognized arguments: ([-\u2010-\u2015]*)([^\s=]+)", message):  # typesetters' dashes too
        evaluates = program.endswith(("test", "validate", "predict"))
        as_run = f"{program} {{}}" if evaluates else "--run_dir={} --resume=auto"
        is_folder = not found[1] and os.path.lexists(found[2]) and Path(found[2]).is_dir()
        guess = as_run.format(shlex.quote(found[2])) if is_folder else _meant(f"--{found[2]}", [*settings, *known])
    if found := re.search(r"does not accept option '([\w.]+)'", message):  # of a file
        meant = _meant(f"--{found[1]}", [*settings, *known])
        guess = meant and meant.removeprefix("--")
    guess = _open_argument(problem) or guess
    return problem, f"did you mean {guess}? see {program} --help" if guess else f"see {program} --help"


def _meant(flag: str, known: Sequence[str]) -> str | None:
    """The flag that may be meant by one that is unknown: of the same name in a group, or spelt alike."""
    first, last = flag.partition(".")[0], flag.removeprefix("--").rpartition(".")[2].replace("-", "_")
    names = (last, f"num_{last}", f"max_{last}", _ELSEWHERE.get(last))
    same = [other for name in names for other in known if re.split(r"--|\.", other)[-1] == name]
    within = [other for other in same if other.startswith(f"{first}.")]
    groups = {other.partition(".")[0] for other in known if "." in other}
    single = [other for other in known if other not in groups]
    # Flags are long and begin alike, so the cutoff is higher than for single words.
    near = within or (len(same) == 1 and same) or get_close_matches(flag, single, n=1, cutoff=0.75) or same
    return next((it for it in near if it.startswith("--data.")), near[0]) if near else None  # rather than the model's


def of_strategy_name(message: str) -> tuple[str, str]:
    """The problem and the remedy where Lightning's `message` says that it knows no strategy of that name."""
    modes = ["auto", *(mode.name for mode in MODES if mode.name != "single")]
    problem = message.split(". ")[0]
    given = problem.split("'")[-2]
    names = {StrategyRegistry[name]["strategy"].__name__: name for name in reversed(modes) if name in StrategyRegistry}
    meant = nearest(given, [*modes, *names])
    guess = "" if meant is None else f"did you mean --trainer.strategy={names.get(meant, meant)}? "
    return problem, f"{guess}the modes: {', '.join(modes)}"


def _of_arguments_of_name(name: str, key: str, value: str) -> tuple[str, str]:
    """The problem and the remedy where a strategy was given by its short `name` with an argument."""
    strategy, arguments = "CLASS", {key: value.strip("'\"")}
    if name in StrategyRegistry:
        strategy = StrategyRegistry[name]["strategy"].__name__
        arguments = StrategyRegistry[name]["init_params"] | arguments
    flags = [f"--trainer.strategy.{key}={'null' if value is None else value}" for key, value in arguments.items()]
    problem = f"--trainer.strategy={name} is a short name, which takes no arguments; a class takes them"
    return problem, f"use {shlex.join([f'--trainer.strategy={strategy}', *flags])}"


def _open_argument(message: str) -> str | None:
    """The flag that may be meant by one that a class does not have.

    What a function takes by `**kwargs` has another flag, as jsonargparse cannot see which arguments there are.
    """
    found = re.search(r"key \"(\S+?)\": '(\S+?)':.*Option '(\w+)' is not accepted", message, flags=re.DOTALL)
    if found is None:
        return None
    parameters = inspect.signature(resolve_name(found[2])).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return f"--{found[1]}.dict_kwargs.{found[3]}"
    meant = nearest(found[3], [parameter.name for parameter in parameters])
    return None if meant is None else f"--{found[1]}.{meant}"


def _of_value(message: str) -> tuple[str, str | None]:
    """A message of jsonargparse about a value, in one line, and what may have been meant; others unchanged."""
    keys = re.findall(r'Parser key "(.+?)"', message)
    flag = f"--{'.'.join(keys)}"
    missing = re.search(
        r"import path string: (\S+)|has no attribute '\w+'\. Got value: (\S+)|'(\S+)':\s+module '\S+' has no attribute",
        message,
    )
    if keys and missing and "data.augment" not in keys:  # whose class has no other one in its place
        name = next(filter(None, missing.groups()))
        package, _, last = name.rpartition(".")
        meant = nearest(last, _subclasses(_BASES.get(keys[-1], type(None))))
        if meant is None and package in sys.modules and (near := nearest(last, vars(sys.modules[package]))):
            meant = f"{package}.{near}"
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
    meant = {"fp16": "16-mixed"}.get(given[1]) or nearest(given[1], words)
    problem = f"{flag}={given[1]} must be {', '.join(most)}{' or ' if most else ''}{last}"
    return problem, None if meant is None else f"{flag}={meant}"


def _subclasses(base: type[Any]) -> list[str]:
    """The names of all known subclasses that are public."""
    children: list[type[Any]] = base.__subclasses__()
    below = [name for child in children for name in (child.__name__, *_subclasses(child))]
    return [name for name in below if not name.startswith("_")]
