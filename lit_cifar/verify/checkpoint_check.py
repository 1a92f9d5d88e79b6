"""Loads the checkpoint of a mode on one device, without the mode, and compares it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.modes import SILENT
from lit_cifar.reporting.per_rank import PerRankAccuracy
from lit_cifar.reporting.rank_statistics import pooled
from lit_cifar.verify.comparison import NOISE_FACTOR, Step, differences
from lit_cifar.verify.configuration import made, module_of
from lit_cifar.verify.logged_metrics import METRIC_BOUND, Logged, logged_problems


def checkpoint_problems(path: Path, last: Step, *, config: Mapping[str, Any]) -> list[str]:
    """Where the checkpoint, loaded strictly into a plain network and optimizer, is not bit for bit the last step."""
    checkpoint = read_checkpoint(path)
    with torch.device("meta"):  # to draw weights takes longer than to read these
        module = module_of(config)
    network = module.network
    try:
        module.header.check(checkpoint)
        network.load_state_dict(checkpoint["state_dict"], strict=True, assign=True)
        optimizer: Optimizer = made(config["model"]["optimizer"], network.parameters())
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        return [f"checkpoint: one device cannot load it: {str(error).splitlines()[0][:160]}"]
    loaded = {**last, "state": network.state_dict(), "optimizer": optimizer.state_dict()}
    return [
        f"checkpoint: {name} differs from the last step ({kind})"
        for kind, by_name in differences(loaded, last).items()
        for name, value in by_name.items()
        if value
    ][:1]


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    counts: tuple[int, int]  # right and seen samples
    metrics: dict[str, float]  # by the names under which they are logged


def evaluation_problems(path: Path, *, counts: tuple[int, int], found: Logged, config: Mapping[str, Any]) -> list[str]:
    """Where an evaluation is not that of one device with the checkpoint's weights.

    In mixed precision what may differ is measured: one device evaluates in float32, too.
    """
    alone = evaluated_alone(path, config=config)
    turned, bounds = 0, dict.fromkeys(alone.metrics, METRIC_BOUND)
    if str(config["trainer"]["precision"]).startswith("bf16"):
        wide = evaluated_alone(path, config=config, precision="32-true")
        turned = max(2, round(NOISE_FACTOR * abs(wide.counts[0] - alone.counts[0])))
        bounds = {
            name: max(turned / alone.counts[1], NOISE_FACTOR * abs(wide.metrics[name] - value))
            for name, value in sorted(alone.metrics.items(), reverse=True)  # one name begins as another one
        }
    problems = []
    if counts[1] != alone.counts[1] or abs(counts[0] - alone.counts[0]) > turned:
        found_words, expected_words = (f"{right} of {seen}" for right, seen in (counts, alone.counts))
        problems.append(f"evaluation: {found_words} right, one device with the same weights has {expected_words}")
    own = {key: value for key, value in found.items() if key[0] in alone.metrics}
    expected = {key: alone.metrics[key[0]] for key in own}
    return problems + logged_problems(own, expected, bounds=bounds, source="one device with the same weights has")


def evaluated_alone(path: Path, *, config: Mapping[str, Any], precision: str | None = None) -> Evaluation:
    """The validation of one device with the checkpoint's weights, in the configuration's precision or another."""
    checkpoint = read_checkpoint(path)
    model = config["model"]
    module = module_of(config, label_smoothing=model["label_smoothing"], flip_test=model["flip_test"])
    weights = checkpoint["state_dict"]
    module.network.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    accuracy = _SilentAccuracy()
    settings = {name: config["trainer"][name] for name in ("accelerator", "precision", "limit_val_batches")}
    with quiet(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # as `Trace`
        settings |= SILENT if precision is None else SILENT | {"precision": precision}
        trainer = L.Trainer(devices=1, callbacks=[accuracy], **settings)
        trainer.validate(module, CIFAR10DataModule(**config["data"]), verbose=False)
    count = pooled(accuracy.counts["val"])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Evaluation((count.correct, count.total), metrics)


class _SilentAccuracy(PerRankAccuracy):
    """The counts without their table."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print nothing."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's lines about the hardware.

    By a filter of its own: threads that are here at the same time would put back each other's level.
    """
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    def is_grave(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_grave)
    try:
        yield
    finally:
        logger.removeFilter(is_grave)
