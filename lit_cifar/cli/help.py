"""The help of `fit`, `validate`, `test` and `predict`: the flags that most runs need, or all.

The texts come from the docstrings of our classes, by way of the parser's actions, so each is written once. The texts of
flags without a class are here, and of some of Lightning's flags, whose own are very long or offer what is refused here.
"""

import re
from argparse import SUPPRESS, Action
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from lit_cifar import internals
from lit_cifar.cli.overview import SUBCOMMANDS, overview

# The titles in the short help, and the flags below each.
_RUN = ("config", "run_dir", "seed_everything")
_WHERE = ("trainer.accelerator", "trainer.strategy", "trainer.devices", "trainer.num_nodes", "trainer.precision")
_DATA = ("data.dataset", "data.root", "data.image_size")
_TESTED = (*_DATA, "data.eval_batch_size")
_NETWORK = ("model.arch", "model.stem", "model.network")
_OPTIMIZATION = ("model.optimizer", "model.lr_scheduler", "model.rate_scaling.rule")
_EVALUATION = {"run": (*_RUN, "ckpt_path"), "network": _NETWORK, "data": (*_TESTED, "data.val_size"), "devices": _WHERE}
COMMON: dict[str, dict[str, tuple[str, ...]]] = {
    "fit": {
        "run": (*_RUN, "resume", "ckpt_path"),
        "network": _NETWORK,
        "optimization": (*_OPTIMIZATION, "trainer.max_epochs", "trainer.accumulate_grad_batches"),
        "data": (*_DATA, "data.batch_size"),
        "devices": (*_WHERE, "trainer.sync_batchnorm", "virtual_replicas"),
    },
    "validate": _EVALUATION,
    "test": _EVALUATION,
    "predict": _EVALUATION | {"data": (*_TESTED, "data.predict_dir")},
}
_TEXTS = {
    "config": "Read flags from a YAML file, as RUN_FOLDER/config.yaml. Later files and flags win over earlier ones.",
    "run_dir": "Folder that this run writes to. The default is runs/<time>-<subcommand>[-<mode>].",
    "resume": "With auto, resume the run in --run_dir from its newest valid checkpoint; start it if there is none.",
    "virtual_replicas": "Cut every batch into this many parts: 1, 2 or more processes then end with the same bits.",
    "seed_everything": "Seed of the initial weights. Order, augmentation, split and dropout follow --data.seed.",
    "ckpt_path": "Checkpoint to resume from (fit) or to evaluate (the others): a file, as "
    "RUN_FOLDER/checkpoints/best.ckpt.",
    "weights_only": "Has no effect: only tensors and primitives are read from a checkpoint, and false is refused.",
    "trainer.accelerator": "Kind of device: cpu, gpu, or auto, which takes GPUs if there are any.",
    "trainer.strategy": "Mode of parallelism, as dp, ddp, ddp_spawn, mp, pp, fsdp2 or tp. `python -m lit_cifar doctor` "
    "lists them all, and which of them run on this machine.",
    "trainer.devices": "Number of devices on each machine: GPUs, or on the CPU processes or virtual devices.",
    "trainer.num_nodes": "Number of machines, on which torchrun or srun starts the processes.",
    "trainer.precision": "Floating point format: 32-true, 64-true, bf16-mixed (autocast; what a fit chooses where the "
    "processor has instructions for it), or 16-mixed (with loss scaling, on GPUs only).",
    "trainer.max_epochs": "Number of epochs. The default learning rate schedule spans all of them.",
    "trainer.accumulate_grad_batches": "Split each global batch into this many parts, to need less memory. An "
    "optimizer step is taken after the last part.",
    "trainer.sync_batchnorm": "Let BatchNorm use the statistics of the batches of all processes together.",
}


def help_of(parser: Any, *, everything: bool) -> str:
    """All commands, or of one the common flags; `everything` is every flag."""
    parser.description = SUBCOMMANDS.get(parser.subcommand, parser.description)
    for action in parser._actions:
        action.help = _TEXTS.get(action.dest, action.help)
        if action.dest == "model.network":
            action.extra_help = str  # "" in place of the names of all layers that torch has
        for subcommand in getattr(action, "_choices_actions", ()):
            subcommand.help = SUBCOMMANDS[subcommand.dest]
    if everything:
        return str(parser.format_help()).rstrip()
    return overview(parser.prog) if parser.subcommand is None else short_help(parser, COMMON[parser.subcommand])


def short_help(parser: ArgumentParser, groups: Mapping[str, tuple[str, ...]]) -> str:
    """The flags in `groups`, under their titles, with their texts and defaults."""
    actions = {action.dest: action for action in parser._actions}
    formatter = _ShortFormatter(prog=parser.prog, width=100, max_help_position=34)  # type: ignore[no-untyped-call]
    program = parser.prog.replace(" [options]", "")
    with internals.parser_context(parent_parser=parser, defaults_cache=None):
        folder = "" if program.endswith("fit") else "[RUN_FOLDER] "
        formatter.add_usage(f"{program} {folder}[--config=FILE] [--FLAG=VALUE ...]", [], [])
        formatter.add_text(parser.description)
        for title, names in groups.items():
            formatter.start_section(title)
            formatter.add_arguments([actions[name] for name in names if name in actions])
            formatter.end_section()
        every = f"These are the flags that most runs need. `{program} --help=all` shows every flag; with --print_config"
        formatter.add_text(f"{every} the command prints the configuration that it would use, and exits.")
        return formatter.format_help().rstrip()


class _ShortFormatter(DefaultHelpFormatter):
    """Help without types, lists of known classes, and the forms `--FLAG+` that add to a list."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        return text if action.default in (None, SUPPRESS) else f"{text} (default: {_in_words(action.default)})"

    def _format_action_invocation(self, action: Action) -> str:
        return re.sub(r", --\S+\+ \S+", "", super()._format_action_invocation(action))


def _in_words(default: Any) -> str:
    """A default as a user would type it; a class is its name and arguments."""
    if isinstance(default, dict | Namespace) and "class_path" in default:
        arguments = ", ".join(f"{name}={value}" for name, value in default.get("init_args", {}).items())
        return f"{default['class_path'].rpartition('.')[2]} with {arguments}"
    return str(default).lower() if isinstance(default, bool) else str(default)
