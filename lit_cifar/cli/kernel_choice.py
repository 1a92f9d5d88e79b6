"""`--kernels=auto` of a run: who measures, and where the choice is written among the arguments."""

import os
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace
from lightning.pytorch.cli import instantiate_class

from lit_cifar.errors import ConfigError
from lit_cifar.launch.heap import keep_freed_memory
from lit_cifar.models import build_network, stem_of
from lit_cifar.models.kernels import Kernels, fastest, time_candidates, told_by_parent


class KernelChoice:
    """The fastest kernels, written into `arguments` as `--trainer.precision` and `--model.channels_last`.

    They are measured by one process, before it starts others. A run that is resumed keeps what it had: other kernels
    round differently.
    """

    def __init__(self, arguments: Namespace) -> None:
        self.seconds: dict[Kernels, float] = {}  # of a step with each candidate; empty if nothing was measured here
        kernels = told_by_parent() or _of_resumed(arguments)
        if kernels is None:
            self.seconds = _measure(arguments)
            kernels = fastest(self.seconds)
        self.kernels = kernels
        arguments.trainer.precision = kernels.precision
        arguments.model.channels_last = kernels.channels_last


def _of_resumed(arguments: Namespace) -> Kernels | None:
    """What the run in the folder has been trained with; None for a new one."""
    if arguments.resume is None or arguments.ckpt_path is None:
        return None
    path = Path(arguments.run_dir) / "config.yaml"
    if not path.exists():
        return None
    config = yaml.safe_load(path.read_text())
    return Kernels(config["trainer"]["precision"], config["model"]["channels_last"])


def _measure(arguments: Namespace) -> dict[Kernels, float]:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            "--kernels=auto measures before a run starts its processes, and torchrun has started them already",
            remedy="measure once with python -m lit_cifar bench step, and pass --trainer.precision and "
            "--model.channels_last",
        )
    model = arguments.model
    with torch.random.fork_rng():
        network = (
            build_network(
                model.arch,
                stem=stem_of(model.arch, model.stem),
                num_classes=model.num_classes,
                image_size=model.image_size,
            )
            if model.network is None
            else instantiate_class((), model.network)
        )
    has_gpu = torch.cuda.is_available() and arguments.trainer.accelerator != "cpu"
    if not has_gpu:
        keep_freed_memory()  # as the run will
    return time_candidates(
        network,
        (3, model.image_size, model.image_size),
        batch_size=arguments.data.batch_size,
        device=torch.device("cuda" if has_gpu else "cpu"),
    )
