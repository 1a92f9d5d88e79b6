"""The network's graph in TensorBoard."""

import copy
import warnings

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.reporting.figures import EvaluationFigures
from lit_cifar.reporting.tensorboard import tensorboard_writer


class ModelGraph(Callback):
    """Draws `pl_module.network` into TensorBoard's Graphs tab before a fit starts, if `EvaluationFigures` draws.

    A copy is traced, on the CPU and in evaluation mode, before some strategies split the network.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        writer = tensorboard_writer(trainer) if stage == "fit" else None
        figures = [c for c in trainer.callbacks if isinstance(c, EvaluationFigures)]  # type: ignore[attr-defined]
        if writer is None or not all(found.every_n_epochs for found in figures):
            return
        network = copy.deepcopy(pl_module.network).cpu().eval()  # type: ignore[union-attr]
        shape: tuple[int, ...] = pl_module.image_shape  # type: ignore[assignment]
        example = torch.zeros(1, *shape, dtype=next(network.parameters()).dtype)
        with warnings.catch_warnings():
            # add_graph uses the deprecated tracer.
            warnings.filterwarnings("ignore", r"`torch\.jit\.trace", FutureWarning)
            warnings.filterwarnings("ignore", r"`torch\.jit\.trace", DeprecationWarning)
            writer.add_graph(network, example)
