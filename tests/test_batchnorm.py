"""BatchNorm over parts of a batch by one device, and over a batch in parts by several processes."""

from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from threads import on_ranks
from torch import Tensor, nn

from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.models.ghost_batchnorm import GhostBatchNorm2d, normalise_apart
from lit_cifar.strategies import ProcessSyncBatchNorm

CUTS = [
    GhostBatches(),
    GhostBatches(data_parallel_size=2),
    GhostBatches(num_microbatches=3),
    GhostBatches(local_replicas=4),
    GhostBatches(data_parallel_size=2, accumulation=2),
    GhostBatches(data_parallel_size=2, local_replicas=2, num_microbatches=2),
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


def test_evaluation_is_that_of_batchnorm() -> None:
    chunked, plain = pair(CUTS[-1])
    for layer in (chunked, plain):
        layer.running_mean.fill_(0.5)
        layer.running_var.fill_(2.0)
        layer.eval()
    images = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    assert chunked(images).equal(plain(images))
    assert chunked(images[:0]).shape == (0, 3, 4, 4)
    assert int(chunked.num_batches_tracked) == 0


def test_what_is_refused() -> None:
    """A chunk of one pixel, as by BatchNorm, and other layers."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        GhostBatchNorm2d(3, chunks=GhostBatches(data_parallel_size=4))(torch.randn(4, 3, 1, 1))
    with pytest.raises(ConfigError, match="alone, not by BatchNorm1d"):
        normalise_apart(nn.Sequential(nn.BatchNorm1d(2)), GhostBatches(data_parallel_size=2))


# Samples held by each of three processes, for a layer made by `make`.
CASES: dict[str, tuple[Any, list[int], torch.dtype]] = {
    "empty": (lambda: nn.BatchNorm2d(3), [4, 0, 3], torch.float32),
    "double": (lambda: nn.BatchNorm2d(3), [5, 0, 2], torch.float64),
    "bfloat16": (lambda: nn.BatchNorm2d(3), [5, 0, 2], torch.bfloat16),
    "average": (lambda: nn.BatchNorm2d(3, momentum=None), [3, 1, 2], torch.float64),
    "no_affine": (lambda: nn.BatchNorm2d(3, affine=False), [3, 1, 2], torch.float64),
    "untracked": (lambda: nn.BatchNorm2d(3, track_running_stats=False), [3, 1, 2], torch.float64),
    "1d": (lambda: nn.BatchNorm1d(3), [3, 1, 2], torch.float64),
    "3d": (lambda: nn.BatchNorm3d(3), [3, 1, 2], torch.float64),
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}
SPATIAL = {nn.BatchNorm1d: (), nn.BatchNorm2d: (4, 5), nn.BatchNorm3d: (2, 3, 4)}
NUM_STEPS = 2


def layer_of(name: str) -> nn.Module:
    make, _, dtype = CASES[name]
    layer = make()
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -1.5, 2.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, -3.0]))
    return layer.double() if dtype == torch.float64 else layer


def batch_of(name: str, step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step and the gradient of its output. The mean is large beside the spread."""
    make, sizes, dtype = CASES[name]
    generator = torch.Generator().manual_seed(step)
    shape = (sum(sizes), 3, *SPATIAL[type(make())])
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return (x * 2 + 10).to(dtype), grad.to(dtype)


def train(layer: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Outputs, input gradients, summed parameter gradients and buffers after one step for each (x, grad)."""
    found: dict[str, Tensor] = {}
    layer.train()
    for step, (part, grad) in enumerate(parts):
        x = part.clone().requires_grad_()
        output = layer(x)
        output.backward(grad)
        found |= {f"output{step}": output.detach(), f"grad{step}": x.grad}
    found |= {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
    if layer.track_running_stats:
        found["evaluated"] = layer.eval()(parts[0][0]).detach()
    return found | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def synced(rank: int, name: str) -> dict[str, Tensor]:
    """What `train` finds on one of three ranks, with its part of each batch."""
    sizes = CASES[name][1]
    (layer,) = ProcessSyncBatchNorm().apply(nn.Sequential(layer_of(name)))
    batches = [batch_of(name, step) for step in range(NUM_STEPS)]
    return train(layer, [(x.split(sizes)[rank], grad.split(sizes)[rank]) for x, grad in batches])


@pytest.mark.parametrize("name", CASES)
def test_processes_equal_one_process_with_the_whole_batch(name: str) -> None:
    expected = train(layer_of(name), [batch_of(name, step) for step in range(NUM_STEPS)])
    parts = on_ranks(3, partial(synced, name=name))
    dtype = CASES[name][2]
    assert set(parts[0]) == set(expected)
    for key, value in expected.items():
        if key.startswith(("output", "grad", "evaluated")):
            found = torch.cat([part[key] for part in parts])
        elif key.startswith("d"):
            found = torch.stack([part[key] for part in parts]).sum(dim=0)
        else:  # a running statistic: the same bits in every process
            assert all(torch.equal(part[key], parts[0][key]) for part in parts), key
            found = parts[0][key]
        assert found.dtype == value.dtype, key
        scale = max(1.0, value.abs().max().item())
        assert (found.double() - value.double()).abs().max() <= TOLERANCE[dtype] * scale, key


def test_a_single_value_over_all_processes_has_no_variance() -> None:
    """Every process must notice: one that went on alone would wait for the others for ever."""

    def on_rank_0_alone(rank: int) -> None:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            ProcessSyncBatchNorm().apply(nn.BatchNorm2d(2))(torch.ones(1 if rank == 0 else 0, 2, 1, 1))

    on_ranks(3, on_rank_0_alone)


def test_apply_and_revert_change_nothing_but_the_class() -> None:
    model, plugin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), ProcessSyncBatchNorm()
    keys, weight = list(model.state_dict()), model[1].weight
    plugin.apply(model)
    assert type(model[1]).__name__ == "SyncedBatchNorm2d"
    assert list(model.state_dict()) == keys
    assert model[1].weight is weight
    plugin.revert(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert model[1].weight is weight


def test_a_batchnorm_with_a_forward_of_its_own_is_refused() -> None:
    """On a GPU too, where torch would put a SyncBatchNorm in its place."""

    class Act(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    for device in ("cpu", "cuda"):
        with (
            patch("lit_cifar.strategies.sync_batchnorm._device_to_be", lambda _, device=device: torch.device(device)),
            pytest.raises(ConfigError, match="with 0, a Act: what it computes beside BatchNorm would be lost"),
        ):
            ProcessSyncBatchNorm().apply(nn.Sequential(Act(3)))
