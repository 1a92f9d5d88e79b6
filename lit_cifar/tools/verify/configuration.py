"""The settings that result from the user's flags and files, as the command line resolves them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from os import cpu_count
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from lit_cifar.callbacks import default_callbacks
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import ConfigError
from lit_cifar.models.resnet import SHAPES
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.verify.runs import refuse_if_invalid, run

EXACT = "64-true"

# In float64, in which no rounding looks like a mistake, on images that need no files. An epoch is a batch of 64 and a
# ragged one of 37, of which no two or four processes have equal parts, but 9 or more: BatchNorm over few values
# magnifies rounding, and so does a large learning rate. The evaluation has batches of 24, 24 and 13.
DEFAULTS = (
    f"--trainer.precision={EXACT}",
    "--model.optimizer.lr=1e-4",
    "--data.dataset=synthetic",
    "--data.num_train=162",
    "--data.num_test=1",
    "--data.val_size=61",
    "--data.batch_size=64",
    "--data.eval_batch_size=24",
)

_OWNED = (
    "--trainer.strategy",
    "--trainer.devices",
    "--trainer.sync_batchnorm",
    "--trainer.max_steps",
    "--trainer.max_epochs",
    "--run_dir",
    "--ckpt_path",
    "--resume",
)

_MAX_AT_ONCE = 8  # each holds some copies of the network on disk

# Outputs that are not used here; each of them takes longer than a step.
_LEFT_OUT = ("--trainer.enable_progress_bar=false", "--trainer.num_sanity_val_steps=0", "--figures.every_n_epochs=0")

# Precisions in which rounding does not cancel a whole step.
_PRECISIONS = {"32": "32-true", "64": EXACT, "bf16": "bf16-mixed"}
_PRECISIONS |= {name: name for name in ("32-true", EXACT, "bf16-mixed")}


@dataclass(frozen=True)
class Configuration:
    """The flags that all runs share, and their values after defaults and files."""

    flags: tuple[str, ...]  # what to pass to `fit`
    config: dict[str, Any]  # every setting with its value, as `fit --print_config` shows it

    @classmethod
    def of(cls, args: list[str], *, devices: int, folder: Path) -> "Configuration":
        """Resolve the user's `args`; refuse flags that `verify` sets, and precisions that leave out steps."""
        owned = [arg for arg in args if arg.split("=")[0] in _OWNED]
        if owned:
            raise ConfigError(f"verify sets {owned[0].split('=')[0]} itself, for each mode", remedy="leave it out")
        own_config = any(arg.split("=")[0] in ("--config", "-c") for arg in args)
        flags = [*args] if own_config else [*DEFAULTS, *args]
        flags += _LEFT_OUT
        outcome = run("fit", *flags, "--print_config", folder=folder)
        refuse_if_invalid(outcome)
        config = yaml.safe_load(outcome.stdout)
        if (precision := str(config["trainer"]["precision"] or "32-true")) not in _PRECISIONS:
            raise ConfigError(
                f"verify compares in 32-true, 64-true or bf16-mixed, not in --trainer.precision={precision}, in which "
                "rounding leaves out steps",
                remedy="leave it out, or pass --trainer.precision=64-true",
            )
        if config["trainer"]["accelerator"] == "auto" and torch.cuda.device_count() < devices:
            flags.append("--trainer.accelerator=cpu")
            config["trainer"]["accelerator"] = "cpu"
        if not own_config and config["model"]["network"] is None:
            flags += _network_flags(config["model"])
        return cls(tuple(flags), config)

    @property
    def precision(self) -> str:
        return precision_of(self.config)

    @property
    def is_exact(self) -> bool:
        """Whether bounds are far below any mistake; else they are measured, and rounding may go beyond them."""
        return self.precision == EXACT or self.num_parts is not None

    @property
    def num_at_once(self) -> int:
        """Number of runs at the same time: on the CPU a short run mostly starts up, which uses one core."""
        return min(cpu_count() or 1, _MAX_AT_ONCE) if self.config["trainer"]["accelerator"] == "cpu" else 1

    @property
    def num_gpus(self) -> int:
        return 0 if self.config["trainer"]["accelerator"] == "cpu" else torch.cuda.device_count()

    @property
    def accumulation(self) -> int:
        return int(self.config["trainer"]["accumulate_grad_batches"])

    @property
    def batch_size(self) -> int:
        return int(self.config["data"]["batch_size"])

    def module(self) -> LitResNet:
        return module_of(self.config)

    @cached_property
    def plain_module(self) -> LitResNet:
        """One for checkpoints to be loaded into: to draw the weights of another takes longer than to read them."""
        return self.module()

    @property
    def num_parts(self) -> int | None:
        """The number of virtual replicas: then every mode is to have the bits of one device."""
        found: int | None = self.config.get("virtual_replicas")
        return found

    @property
    def added_callbacks(self) -> list[str]:
        """Classes of the callbacks that are the user's choice."""
        known = {type(callback).__name__ for callback in default_callbacks()}
        classes = [callback["class_path"] for callback in self.config["trainer"].get("callbacks") or []]
        return [path for path in classes if path.rpartition(".")[2] not in known]

    def data(self) -> CIFAR10DataModule:
        data = CIFAR10DataModule(**self.config["data"])
        data.prepare_data()
        data.setup("fit")
        return data

    def train_sampler(self, data: CIFAR10DataModule) -> TrainSampler:
        """The sampler of one device."""
        sampler = replace(data.train_sampler(), accumulation=self.accumulation)
        sampler.check()
        return sampler

    @property
    def evaluates(self) -> bool:
        return (
            CIFAR10DataModule(**self.config["data"]).val_size > 0 and self.config["trainer"]["limit_val_batches"] != 0
        )

    def length_flags(self, *, steps: int, accumulation: int) -> list[str]:
        """Flags for `steps` optimizer steps, each logged, in any number of epochs, with a checkpoint before the last.

        There are equally many steps between evaluations, the last of which comes at the end.
        """
        flags = [f"--trainer.max_steps={steps}", "--trainer.max_epochs=-1", "--trainer.log_every_n_steps=1"]
        flags += [f"--trainer.accumulate_grad_batches={accumulation}", f"--last_checkpoint.every_n_steps={steps - 1}"]
        if self.evaluates:
            flags += [
                "--trainer.check_val_every_n_epoch=null",
                f"--trainer.val_check_interval={evaluated_every(steps) * accumulation}",
            ]
        return flags


def _network_flags(model: dict[str, Any]) -> list[str]:
    """Fill in what the user has left open: `tiny` has every kind of layer that ResNet34 has, with an eighth of the
    channels, so that a run takes little more than its start.

    Returns flags that say so.
    """
    flags = []
    if model["arch"] is None:
        model["arch"] = "tiny"
        flags.append("--model.arch=tiny")
    if model["arch"] in SHAPES and model["stem"] is None:
        model["stem"] = "imagenet"
        flags.append("--model.stem=imagenet")
    return flags


def evaluated_every(steps: int) -> int:
    """Half of `steps`, or the largest number of them that divides all."""
    return max(every for every in range(1, max(steps, 2)) if steps % every == 0)


def precision_of(config: Mapping[str, Any]) -> str:
    """In full: "32-true", "64-true" or "bf16-mixed"."""
    return _PRECISIONS[str(config["trainer"]["precision"] or "32-true")]


def module_of(config: Mapping[str, Any], **kwargs: Any) -> LitResNet:
    """With the network that `fit` would train; `kwargs` are further arguments."""
    model, data = config["model"], CIFAR10DataModule(**config["data"])
    return LitResNet(
        model["arch"],
        stem=model["stem"],
        network=None if model["network"] is None else made(model["network"]),
        num_classes=model["num_classes"] or len(data.classes),
        image_size=model["image_size"] or data.image_size,
        **kwargs,
    )


def made(config: Mapping[str, Any], *args: Any) -> Any:
    """An object of the class that a configuration names, with its arguments there, after `args`."""
    module, _, name = config["class_path"].rpartition(".")
    return getattr(import_module(module), name)(*args, **config.get("init_args", {}))
