"""The flags that all runs of a `verify` share, and what follows from them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os import sched_getaffinity
from pathlib import Path
from typing import Any, Final

import torch
from jsonargparse import ArgumentParser

from lit_cifar.configured import own_network
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.models.fine_tuning import FineTuning
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.terminal import refuse_owned, say
from lit_cifar.tools.verify.record import EXACT_BOUND, KINDS, LOGITS, LOGITS_BOUND, METRIC_BOUND, SAME_BITS, Bounds
from lit_cifar.tools.verify.runs import all_settings

EXACT: Final = "64-true"

# Images that need no files. An epoch is a batch of 64 and a ragged one of 37, of which no two or four processes have
# equal parts, but 9 or more: BatchNorm over few values magnifies rounding, as large rates do. Evaluated: 24, 24, 13.
DEFAULTS = (
    "--model.optimizer.lr=1e-4",
    "--data.dataset=synthetic",
    "--data.num_train=162",
    "--data.num_test=1",
    "--data.val_size=61",
    "--data.batch_size=64",
    "--data.eval_batch_size=24",
)

# Every kind of layer that ResNet34 has, with an eighth of its channels: a run takes little but its start.
TINY = ("--model.arch=tiny", "--model.stem=imagenet")
_NETWORK = ("--model.arch", "--model.network", "--model.stem")  # flags with which it is the user's

# Flags of `fit` that `verify` sets itself.
_OWNED = {"trainer.strategy", "trainer.devices", "trainer.sync_batchnorm", "trainer.max_steps", "trainer.max_epochs"}
_OWNED |= {"run_dir", "ckpt_path", "resume", "trainer.fast_dev_run", "trainer.overfit_batches"}

# Switches off outputs that are not used here, each of which takes longer than a step, and what a file may shorten.
_LEFT_OUT = ["--trainer.num_sanity_val_steps=0", "--figures.every_n_epochs=0"]
_LEFT_OUT += ["--trainer.fast_dev_run=false", "--trainer.overfit_batches=0"]


@dataclass(frozen=True)
class Configuration:
    """The flags that all runs share, and their values after defaults and files."""

    flags: tuple[str, ...]  # flags of `fit`
    config: dict[str, Any]  # every setting with its value, from `fit --print_config`

    @classmethod
    def from_flags(cls, args: Sequence[str], *, devices: int, folder: Path) -> "Configuration":
        """Resolve the user's `args`, in float64 unless there are virtual replicas; refuse flags that `verify` sets."""
        refuse_owned(args, _OWNED, command="verify")
        own_config = any(arg.partition("=")[0] in ("--config", "-c") for arg in args)
        names_network = own_config or any(arg.startswith(_NETWORK) for arg in args)
        flags = [*([] if own_config else DEFAULTS), *([] if names_network else TINY), *args, *_LEFT_OUT]
        config = all_settings(flags, folder=folder)
        if config.get("virtual_replicas") is None:
            if (precision := str(config["trainer"]["precision"] or EXACT)) not in ("64", EXACT):
                say(f"in {EXACT} and not {precision}: rounding would explain differences")
            flags.append(f"--trainer.precision={EXACT}")
        if isinstance((trainer := config["trainer"]).get("strategy"), dict) or trainer.get("sync_batchnorm"):
            say("each mode has its own strategy and BatchNorm: those in the file are not compared")
        if config["trainer"]["accelerator"] == "auto" and torch.cuda.device_count() < devices:
            flags.append("--trainer.accelerator=cpu")
            config["trainer"]["accelerator"] = "cpu"
        return cls(tuple(flags), config)

    @property
    def num_parts(self) -> int | None:
        """The number of virtual replicas, with which every mode is to have the bits of one device; None without."""
        found: int | None = self.config.get("virtual_replicas")
        return found

    @property
    def bounds(self) -> Bounds:
        """Bounds of a mode's difference from one device, for each kind that is compared."""
        if self.num_parts is not None:
            return SAME_BITS | {LOGITS: 0.0}
        return dict.fromkeys(KINDS, EXACT_BOUND) | {LOGITS: LOGITS_BOUND}

    @property
    def metric_bound(self) -> float:
        """Bound of metrics that a mode computes, and of numbers that it saves beside its weights."""
        return METRIC_BOUND if self.num_parts is None else 0.0

    @property
    def on_cpu(self) -> bool:
        return bool(self.config["trainer"]["accelerator"] == "cpu")

    @property
    def num_gpus(self) -> int:
        return 0 if self.on_cpu else torch.cuda.device_count()

    @property
    def num_at_once(self) -> int:
        """Number of runs at the same time: on the CPU a short run mostly starts up, which uses one core.

        The disk has room for some copies of the network.
        """
        return min(len(sched_getaffinity(0)), 8) if self.on_cpu else 1

    @property
    def accumulation(self) -> int:
        return int(self.config["trainer"]["accumulate_grad_batches"])

    @cached_property
    def module(self) -> LitResNet:
        """The network that `fit` would train, made once: to draw its weights takes longer than to load a checkpoint."""
        model, data = self.config["model"], self.data_module()
        return LitResNet(
            model["arch"],
            stem=model["stem"],
            network=own_network(model["network"]),
            num_classes=model["num_classes"] or len(data.classes),
            image_size=model["image_size"] or data.image_size,
            fine_tuning=FineTuning(**model["fine_tuning"]),
        )

    @torch.no_grad()
    def draws_random_numbers(self) -> bool:
        """Whether a pass in training advances torch's generator: dropout does, and so does any code that samples."""
        network, shape = self.module.network, self.module.image_shape
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            with suppress(Exception):  # the network may be the user's; `fit` reports its errors
                network.train()(torch.zeros(4, *shape))
            return not torch.equal(before, torch.get_rng_state())

    def data_module(self) -> CIFAR10DataModule:
        """The data module of `fit`, not set up."""
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(CIFAR10DataModule, "data")
        made: CIFAR10DataModule = parser.instantiate(parser.parse_object({"data": self.config["data"]})).data
        return made

    def in_words(self, chunks: GhostBatches) -> str:
        """The single-device computation, e.g. "one device, 2 x 16 images normalised apart"."""
        if self.num_parts is not None:
            return f"one device, {self.num_parts} virtual replicas"
        num_chunks = chunks.accumulation
        if not chunks.synchronised:
            num_chunks *= chunks.data_parallel_size * chunks.local_replicas * chunks.num_microbatches
        size = self.config["data"]["batch_size"] // num_chunks
        return "one device" + (f", {num_chunks} x {size} images normalised apart" if num_chunks > 1 else "")

    def length_flags(self, *, steps: int, accumulation: int) -> list[str]:
        """Flags for `steps` optimizer steps, each logged, in any number of epochs, with a checkpoint before the last.

        There are equally many steps between evaluations, the last of which comes at the end.
        """
        flags = [f"--trainer.max_steps={steps}", "--trainer.max_epochs=-1", "--trainer.log_every_n_steps=1"]
        flags += [f"--trainer.accumulate_grad_batches={accumulation}", f"--last_checkpoint.every_n_steps={steps - 1}"]
        if isinstance(limit := self.config["trainer"].get("limit_train_batches"), int):  # of the loader, not steps
            flags.append(f"--trainer.limit_train_batches={limit * accumulation // self.accumulation}")
        if self.data_module().val_size > 0 and self.config["trainer"]["limit_val_batches"] != 0:
            every = max(every for every in range(1, steps) if steps % every == 0)  # half of them, if possible
            flags += ["--trainer.check_val_every_n_epoch=null", f"--trainer.val_check_interval={every * accumulation}"]
        return flags
