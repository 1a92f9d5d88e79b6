"""One device that normalises as replicas or microbatches would, against `nn.BatchNorm2d` on every chunk by itself."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.models.ghost_batchnorm import GhostBatchNorm2d, normalise_apart

CUTS = [
    GhostBatches(),
    GhostBatches(dp_size=2),
    GhostBatches(num_microbatches=3),
    GhostBatches(replicas_per_rank=4),
    GhostBatches(dp_size=2, accumulation=2),
    GhostBatches(dp_size=2, replicas_per_rank=2, num_microbatches=2),
]
# One that divides by all parts, and one that leaves the parts unequal.
SIZES = [24, 17]


def pair(chunks: GhostBatches, *, momentum: float | None = 0.1) -> tuple[GhostBatchNorm2d, nn.BatchNorm2d]:
    """A chunked layer and a plain one in the same state, which is not that of a new layer."""
    torch.manual_seed(0)
    chunked = GhostBatchNorm2d(3, chunks=chunks, momentum=momentum, eps=1e-3, dtype=torch.float64)
    nn.init.normal_(chunked.weight)
    nn.init.normal_(chunked.bias)
    plain = nn.BatchNorm2d(3, momentum=momentum, eps=1e-3, dtype=torch.float64)
    plain.load_state_dict(chunked.state_dict())
    return chunked, plain


def samples(num_samples: int, *, seed: int) -> Tensor:
    """Each has a mean and a spread of its own, so that it matters with whom it is normalised."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_samples, 3, 4, 4, dtype=torch.float64, generator=generator)
    mean, spread = torch.randn(2, num_samples, 3, 1, 1, dtype=torch.float64, generator=generator)
    return noise * spread + mean


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("num_samples", SIZES)
@pytest.mark.parametrize("chunks", CUTS, ids=str)
def test_equals_batchnorm_of_every_chunk(chunks: GhostBatches, num_samples: int, momentum: float | None) -> None:
    """Outputs, gradients of input and parameters, and the first replica's buffers, after two batches."""
    chunked, plain = pair(chunks, momentum=momentum)
    positions = chunks.positions(num_samples)
    replicas = [deepcopy(plain) for _ in positions]
    for seed in range(2):
        ours = samples(num_samples, seed=seed).requires_grad_()
        theirs = samples(num_samples, seed=seed).requires_grad_()
        weights = samples(num_samples, seed=seed + 9)
        output = chunked(ours)
        (output * weights).sum().backward()
        for replica, own in zip(replicas, positions, strict=True):
            for chunk in own:
                expected = replica(theirs[chunk])
                torch.testing.assert_close(output[chunk], expected)
                (expected * weights[chunk]).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    for name in ("weight", "bias"):
        total = sum(getattr(replica, name).grad for replica in replicas)
        torch.testing.assert_close(getattr(chunked, name).grad, total)
    torch.testing.assert_close(chunked.state_dict(), replicas[0].state_dict())


@pytest.mark.parametrize("chunks", CUTS, ids=str)
def test_evaluation_is_that_of_batchnorm(chunks: GhostBatches) -> None:
    layers = pair(chunks)
    for layer in layers:
        layer.running_mean.fill_(0.5)
        layer.running_var.fill_(2.0)
        layer.eval()
    chunked, plain = layers
    images = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    assert chunked(images).equal(plain(images))
    assert chunked(images[:0]).shape == (0, 3, 4, 4)
    assert int(chunked.num_batches_tracked) == 0


def test_what_is_refused() -> None:
    """A chunk of one pixel, as by BatchNorm, and other layers."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        GhostBatchNorm2d(3, chunks=GhostBatches(dp_size=4))(torch.randn(4, 3, 1, 1))
    with pytest.raises(ConfigError, match="and Sequential has a BatchNorm1d"):
        normalise_apart(nn.Sequential(nn.BatchNorm1d(2)), GhostBatches(dp_size=2))
