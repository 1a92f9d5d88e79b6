"""What the release before had and this one has not: each is refused in one line, with what serves instead.

The table is for this release alone.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import NoReturn

from lit_cifar.errors import ConfigError

# By command, by flag (which is a setting of a YAML file too, with all below it), by a command's own flag or one of its
# values, or by class.
INSTEAD: dict[str, str] = {
    # Checks.
    "relations --only=autocast": "compare types and steps with and without it in a test of your own",
    "relations --only=compile": "torch.testing.assert_close between a module and what torch.compile makes of it",
    "relations --only=effects": "--also=PACKAGE.FUNCTION, a relation of your own",
    "relations --only=groups": "--also=PACKAGE.FUNCTION, a relation of your own",
    "relations --only=recomputation": "--same=ARGUMENTS that turn your checkpointing of activations off",
    "verify --module": "relations --module=CLASS --data=CLASS -- FLAGS",
    "--replica_audit.exclude": "nothing; what need not be equal is said once and ends no run",
    "lit_cifar.Replay": "python -m lit_cifar relations train.py",
    # Commands.
    "lit_cifar.tools.bench.memory.TrainingMemory": "analysis.memory.TrainingMemory, with PYTHONPATH=notebooks",
    "lit_cifar.tools.bench.timeline.Timeline": "analysis.timeline.Timeline, with PYTHONPATH=notebooks",
    "bench": "--trainer.profiler=simple, or benchmarks/scripts/overhead.py",
    "chaos": "kill ranks under torchrun --max-restarts=3 with --resume=auto, as tests/chaos does",
    "doctor --devices": "python -m lit_cifar verify --modes=ddp --devices=N trains on N devices",
    "doctor --run_dir": "fit, which refuses a folder that it cannot write to",
    "export": "torch.export and torch.onnx: docs/data-and-networks.md has the lines",
    "report": "tensorboard --logdir runs, or the notebooks",
    # Data.
    "--data.augment.policy": "--data.augment.transforms+=torchvision.transforms.v2.TrivialAugmentWide",
    "--data.augment.num_ops": "--data.augment.transforms+=torchvision.transforms.v2.RandAugment",
    "--data.augment.magnitude": "--data.augment.transforms+=torchvision.transforms.v2.RandAugment",
    "--data.augment.jitter": "--data.augment.transforms+=torchvision.transforms.v2.ColorJitter",
    "--data.augment.hue": "--data.augment.transforms+=torchvision.transforms.v2.ColorJitter",
    "--data.augment.erasing": "--data.augment.transforms+=torchvision.transforms.v2.RandomErasing",
    "--data.augment.small_epochs": "leave it out",
    "--data.augment.small_size": "leave it out",
    "--data.pictures.decode": "--data.pictures.memory_gb=0 to decode in each epoch, or leave it out",
    "--data.pictures.num_workers": "--data.num_workers",
    "--data.pictures.cache_dir": "leave it out: pictures are decoded into the memory",
    "--data.pictures.cache_limit_gb": "--data.pictures.memory_gb",
    "--data.mixup": "--data.mixing.mixup",
    "--data.cutmix": "--data.mixing.cutmix",
    "--data.class_weights": "--data.balance.class_weights",
    "--data.balanced": "--data.balance.draw_equally",
    "--data.shuffle": "--data.order.shuffle",
    "--data.frozen_order": "--data.order.frozen",
    "--data.drop_last": "--data.order.drop_last",
    "--data.pad_eval": "--data.order.pad_eval",
    # Training, checkpoints and ranks.
    "--last_checkpoint.sharded": "fsdp2 writes one file, which every mode reads",
    "--max_restarts": "torchrun --max-restarts=3 --nproc-per-node=2 -m lit_cifar fit --resume=auto --run_dir=FOLDER",
    "--model.weights": "--model.fine_tuning.weights",
    "--model.freeze": "--model.fine_tuning.freeze",
    "--model.unfreeze_at": "--model.fine_tuning.unfreeze_at",
    "--model.head_lr": "--model.fine_tuning.head_lr",
    "--model.lr_scaling": "--model.rate_scaling.rule",
    "--model.base_batch_size": "--model.rate_scaling.base_batch_size",
    "--model.recompute": "--trainer.accumulate_grad_batches or --trainer.precision=bf16-mixed take less memory",
}
# Settings of groups that files may still have where they were before there were groups.
_OF_AUGMENT = (
    "padding reflect alternate_flips policy num_ops magnitude jitter hue erasing cutout small_epochs small_size"
)
_OF_PICTURES = "decoded_size decode cache_dir cache_limit_gb skip_unreadable"
for _group, _names in {"augment": _OF_AUGMENT, "pictures": _OF_PICTURES}.items():
    for _name in _names.split():
        _flag = f"--data.{_group}.{_name}"
        INSTEAD[f"--data.{_name}"] = INSTEAD.get(_flag, _flag)


def refuse_words(words: Sequence[str]) -> None:
    """Raise a `ConfigError` for a word of the command line that names what has gone."""
    command = words[0] if words else ""
    for word in takewhile(lambda word: word != "--", words[1:]):  # behind it are the flags of a user's own script
        flag, _, value = word.partition("=")
        _refuse_setting(flag.rstrip("+"), command=command)
        for key in (f"{command} {flag}={one}" for one in value.split(",")):
            if key in INSTEAD:
                _refuse(key)
        if flag.rstrip("+") == "--trainer.callbacks":
            _refuse_class(value)


def refuse_named(message: str) -> None:
    """Raise a `ConfigError` if a setting or class has gone that jsonargparse's `message` says there is not."""
    unknown = re.search(
        r"does not accept option '([\w.]+)'|Parser key \"([\w.]+)\".*Option '(\w+)' is not accepted", message, re.DOTALL
    )
    if unknown is not None:
        name = ".".join(filter(None, unknown.groups()))
        _refuse_setting(f"--{name}")
        _refuse_setting(f"--{name.partition('.')[2]}")  # below the name of a command
    if unfit := re.search(r"Problem with given class_path '([\w.]+)'", message):
        _refuse_class(unfit[1])


def _refuse_setting(flag: str, *, command: str = "") -> None:
    parts = flag.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for key in (f"{command} {name}", name):
            if key in INSTEAD:
                _refuse(key)


def _refuse_class(value: str) -> None:
    for name in INSTEAD:
        if not name.startswith("--") and "." in name and value in (name, name.rpartition(".")[2]):
            _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise ConfigError(f"{name} has gone", remedy=f"instead: {INSTEAD[name]}")
