"""`MuonSGD`: orthogonal steps for the filters of convolutions, SGD's steps for all else."""

import pytest
import torch
from commands import TINY, mode_flags, run_here
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.models import build_resnet
from lit_cifar.task.muon import MuonSGD, orthogonal

MUON = ["--model.optimizer=lit_cifar.MuonSGD"]


def test_singular_values_come_near_one() -> None:
    matrices = torch.randn(3, 16, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices, iterations=5))
    assert 0.5 < values.min() < values.max() < 1.5


def test_the_singular_vectors_stay() -> None:
    """U S V' becomes U S' V', for wide matrices and for tall ones."""
    for shape in ((8, 30), (30, 8)):
        matrix = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        inner = left.T @ orthogonal(matrix[None], iterations=4)[0] @ right.T
        torch.testing.assert_close(inner, torch.diag(inner.diag()), rtol=0, atol=1e-12)


def network() -> nn.Module:
    torch.manual_seed(0)
    return build_resnet("tiny", stem="imagenet").double()


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> dict[str, Tensor]:
    for step in range(steps):
        images = torch.randn(6, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(net(images), torch.arange(6)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def test_each_matrix_takes_the_step_of_its_formula() -> None:
    """One at a time, written down as in the paper."""
    net, alone = network(), network()
    found = trained(net, MuonSGD(net.parameters(), lr=0.1), steps=1)
    trained(alone, torch.optim.SGD(alone.parameters(), lr=0.0), steps=1)
    for name, parameter in alone.named_parameters():
        if parameter.ndim != 4:
            continue
        assert parameter.grad is not None
        rows = len(parameter)
        direction = orthogonal((1.9 * parameter.grad).flatten(1)[None], iterations=3)[0].view_as(parameter)
        weight = parameter.detach() * rows**0.5 / parameter.detach().norm()
        torch.testing.assert_close(found[name], weight - 0.1 * direction, rtol=1e-9, atol=1e-9, msg=name)


def test_filters_of_zeros_take_a_step() -> None:
    """As of a layer that is made to add nothing at first."""
    filters = nn.Parameter(torch.zeros(4, 3, 1, 1))
    filters.grad = torch.eye(4, 3)[:, :, None, None]
    MuonSGD([filters], lr=0.1).step()
    assert filters[:3].flatten(1).diag().less(-0.01).all()


def test_all_other_parameters_take_the_step_of_sgd() -> None:
    net, plain = network(), network()
    others = [parameter for parameter in net.parameters() if parameter.ndim != 4]
    expected = [parameter for parameter in plain.parameters() if parameter.ndim != 4]
    ours = MuonSGD(others, lr_others=0.3)
    sgd = torch.optim.SGD(expected, lr=0.3, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for net_, optimizer in ((net, ours), (plain, sgd)):
        trained(net_, optimizer, steps=3)
    for found, parameter in zip(others, expected, strict=True):
        torch.testing.assert_close(found, parameter, rtol=1e-12, atol=1e-12)


def test_the_memory_format_changes_nothing() -> None:
    plain, channels_last = network(), network().to(memory_format=torch.channels_last)
    expected = trained(plain, MuonSGD(plain.parameters()))
    found = trained(channels_last, MuonSGD(channels_last.parameters()))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_gradients_may_lie_in_another_order_than_their_parameters() -> None:
    expected, found = network(), network().to(memory_format=torch.channels_last)
    for net in (expected, found):
        torch.manual_seed(1)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
        MuonSGD(net.parameters()).step()
    for (name, value), parameter in zip(expected.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(parameter, value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("mode", ["fsdp2", "tp"])
def test_modes_that_cut_parameters_refuse_it(mode: str) -> None:
    result = run_here("fit", *TINY, *mode_flags(mode), *MUON)
    assert result.status == 2
    assert f"MuonSGD multiplies whole matrices, and --trainer.strategy={mode} gives each process parts" in result.stderr


def test_virtual_replicas_refuse_it() -> None:
    result = run_here("fit", *TINY, *MUON, "--virtual_replicas=4")
    assert result.status == 2
    assert "whose bits depend on how many matrices a process has" in result.stderr
