"""The network's graph in TensorBoard."""

import copy
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lit_cifar.reporting.figures import EvaluationFigures
from lit_cifar.reporting.tensorboard import tensorboard_writer


class ModelGraph(Callback):
    """Draws `pl_module.network` into TensorBoard's Graphs tab after a fit, if `EvaluationFigures` draws.

    Its structure is kept from before some strategies split the network, without the weights. They are zero while it is
    traced, on the CPU and in evaluation mode. Before a fit this would delay the first step by up to a second.
    """

    def __init__(self) -> None:
        self._network: nn.Module | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        figures = [c for c in trainer.callbacks if isinstance(c, EvaluationFigures)]  # type: ignore[attr-defined]
        draws = stage == "fit" and tensorboard_writer(trainer) and all(found.every_n_epochs for found in figures)
        self._network = _structure(pl_module.network) if draws else None  # type: ignore[arg-type]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        writer = tensorboard_writer(trainer)
        if writer is None or self._network is None:
            return
        network = self._network.to_empty(device="cpu").eval()
        with torch.no_grad():
            for tensor in [*network.parameters(), *network.buffers()]:
                tensor.zero_()
        shape: tuple[int, ...] = pl_module.image_shape  # type: ignore[assignment]
        example = torch.zeros(1, *shape, dtype=next(network.parameters()).dtype)
        with warnings.catch_warnings():
            # add_graph uses the deprecated tracer, which would trace twice and compare.
            warnings.filterwarnings("ignore", r"`torch\.jit\.trace", FutureWarning)
            warnings.filterwarnings("ignore", r"`torch\.jit\.trace", DeprecationWarning)
            warnings.filterwarnings("ignore", "The input to trace is already a ScriptModule")
            traced = torch.jit.trace(network, example, check_trace=False)  # type: ignore[no-untyped-call]
            writer.add_graph(traced, example)
        self._network = None


def _structure(network: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device, where they take no memory."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in network.buffers()}
    memo |= {id(weight): nn.Parameter(weight.detach().to("meta")) for weight in network.parameters()}
    return copy.deepcopy(network, memo)
