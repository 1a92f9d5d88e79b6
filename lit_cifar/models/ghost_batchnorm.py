"""BatchNorm that treats one device's batch as several replicas or microbatches would, to compare modes with."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_cifar import internals
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError


class GhostBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` with statistics of its own for every chunk of the batch.

    The running statistics follow the first replica, as those of `ddp`, `dp` and `fsdp2` do: one update for each of its
    chunks, in their order. Evaluation is that of `nn.BatchNorm2d`, and so are parameters, buffers and their names.
    """

    def __init__(self, num_features: int, *, chunks: GhostBatches, **kwargs: Any) -> None:
        super().__init__(num_features, **kwargs)
        self.chunks = chunks

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        first, *others = self.chunks.positions(len(input))
        normalised = [super(GhostBatchNorm2d, self).forward(input[chunk]) for chunk in first]
        own: Any = {"weight": self.weight, "bias": self.bias, "training": True, "eps": self.eps}
        normalised += [F.batch_norm(input[chunk], None, None, **own) for replica in others for chunk in replica]
        order = torch.cat([chunk for replica in (first, *others) for chunk in replica])
        return torch.cat(normalised)[order.argsort()]


def normalise_apart(network: nn.Module, chunks: GhostBatches) -> None:
    """Turn each `nn.BatchNorm2d` of `network` into a `GhostBatchNorm2d`, in place."""
    for layer in network.modules():
        if not isinstance(layer, internals.BatchNorm):
            continue
        if type(layer) is not nn.BatchNorm2d:
            problem = f"a batch can be normalised in parts by nn.BatchNorm2d alone, not by {type(layer).__name__}"
            remedy = "leave out --model.ghost_batchnorm, or compare modes without parts: verify --modes ddp-sync,mp"
            raise ConfigError(problem, remedy=remedy)
        layer.__class__ = GhostBatchNorm2d
        cast(GhostBatchNorm2d, layer).chunks = chunks


def normalises_batches(network: nn.Module) -> bool:
    """Whether, in training, the output for an image depends on the other images of its batch."""
    return any(isinstance(layer, internals.BatchNorm) for layer in network.modules())
