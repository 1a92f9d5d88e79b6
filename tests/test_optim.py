"""Warm-up and decay as a table; `MuonSGD`: orthogonal steps for filters of convolutions, SGD's steps for all else."""

import math
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau as OwnPlateau
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from lit_cifar.models import build_resnet
from lit_cifar.task.muon import MuonSGD, orthogonal
from lit_cifar.task.optim import Recipe, WarmupDecay, keep_saved_types


def rates(total: int, **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = WarmupDecay(optimizer, **settings)
    schedule.set_total_steps(total)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_linear_rise_and_fall_and_half_a_cosine() -> None:
    expected = [0.4, 0.8, 1.2, 1.6, 2.0, *(2 * left / 6 for left in (5, 4, 3, 2, 1, 0))]
    assert rates(10, warmup=0.4, decay="linear") == pytest.approx(expected)
    seen = rates(8, warmup=0, decay="cosine")
    assert (seen[0], seen[4]) == (2.0, pytest.approx(1.0))
    assert seen == sorted(seen, reverse=True)


def planned(schedule: Any, lr: float, momentum: float = 0.9, **settings: Any) -> tuple[Any, Any, Recipe]:
    """An optimizer, a schedule and what they are made of."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=momentum)
    scheduler = schedule(optimizer, **settings)
    if isinstance(scheduler, WarmupDecay):
        scheduler.set_total_steps(20)
    return optimizer, scheduler, Recipe(optimizer, scheduler)


def take(num: int, optimizer: Any, scheduler: Any) -> list[tuple[float, float]]:
    """Rate and momentum of so many steps, of which the third is worse than the one before."""
    seen = []
    for number in range(num):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step(*([float(number == 2)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return seen


def resumed(saved: Any, schedule: Any, says: str, lr: float, momentum: float = 0.9, **settings: Any) -> tuple[Any, Any]:
    """An optimizer and a schedule of a run that goes on after five steps, and `says` what it has changed."""
    optimizer, scheduler, recipe = planned(schedule, lr, momentum, **settings)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    with pytest.warns(UserWarning, match=says) if says else nullcontext():
        recipe.resume(optimizer, scheduler, before=saved[2], step=5, taken=None)
    return optimizer, scheduler


def saved_by(optimizer: Any, scheduler: Any, recipe: Recipe) -> Any:
    return deepcopy((optimizer.state_dict(), scheduler.state_dict(), recipe.settings()))


SCHEDULES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (WarmupDecay, {"warmup": 0.2}, {"warmup": 0.5, "decay": "linear"}),
    (lr_scheduler.StepLR, {"step_size": 2}, {"step_size": 3, "gamma": 0.5}),
    (lr_scheduler.MultiStepLR, {"milestones": [2, 5]}, {"milestones": [3, 6]}),
    (lr_scheduler.ExponentialLR, {"gamma": 0.9}, {"gamma": 0.8}),
    (lr_scheduler.CosineAnnealingLR, {"T_max": 10}, {"T_max": 20, "eta_min": 0.01}),
    (lr_scheduler.LinearLR, {"total_iters": 3}, {"total_iters": 8}),
    (lr_scheduler.ReduceLROnPlateau, {"patience": 0}, {"patience": 0}),
]


@pytest.mark.parametrize(("schedule", "before", "now"), SCHEDULES, ids=lambda value: getattr(value, "__name__", ""))
def test_settings_of_the_run_hold_after_a_resume(schedule: Any, before: dict[str, Any], now: dict[str, Any]) -> None:
    """As if the training had had them from the start; if none has changed, nothing is touched."""
    trained, plan, recipe = planned(schedule, 0.1, **before)
    take(5, trained, plan)
    saved = saved_by(trained, plan, recipe)
    assert take(3, *resumed(saved, schedule, "", 0.1, **before)) == take(3, trained, plan)
    for name, then, lr, momentum, settings in (("lr", 0.1, 0.3, 0.9, before), ("momentum", 0.9, 0.1, 0.5, now)):
        reference, its_plan, _ = planned(schedule, lr, momentum, **settings)
        take(5, reference, its_plan)
        says = rf"optimizer.{name}={then}.*; from optimizer step 5 .*{name}={lr if name == 'lr' else momentum}"
        optimizer, scheduler = resumed(saved, schedule, says, lr, momentum, **settings)
        assert scheduler.state_dict()["last_epoch"] == 5
        expected = torch.tensor(take(3, reference, its_plan))
        torch.testing.assert_close(torch.tensor(take(3, optimizer, scheduler)), expected)


@pytest.mark.parametrize(
    ("schedule", "same", "name"),
    [
        (lr_scheduler.OneCycleLR, {"total_steps": 20}, "max_lr"),
        (lr_scheduler.CyclicLR, {"max_lr": 5.0, "step_size_up": 4}, "base_lr"),
    ],
)
@pytest.mark.parametrize("lr", [0.1, 1.0, 2.0])
def test_rates_of_a_schedule_are_those_of_the_run(schedule: Any, same: dict[str, Any], name: str, lr: float) -> None:
    """Though one of them may be the optimizer's own."""
    trained, plan, recipe = planned(schedule, lr, **same, **{name: 1.0})
    take(5, trained, plan)
    reference, its_plan, _ = planned(schedule, lr, **same, **{name: 2.0})
    take(5, reference, its_plan)
    saved = saved_by(trained, plan, recipe)
    found = resumed(saved, schedule, "the training before had", lr, **same, **{name: 2.0})
    assert take(3, *found) == pytest.approx(take(3, reference, its_plan))


def test_a_plateau_that_follows_another_metric_begins_anew() -> None:
    trained, plan, recipe = planned(OwnPlateau, 0.1, monitor="val/loss")
    plan.step(1.7)
    saved = saved_by(trained, plan, recipe)
    _, scheduler = resumed(saved, OwnPlateau, "monitor=val/loss", 0.1, monitor="val/acc", mode="max")
    assert scheduler.best == -math.inf


def test_kernels_are_those_of_the_run() -> None:
    """Torch would take those of the checkpoint, which a mode may not have."""
    parameter = nn.Parameter(torch.zeros(1))
    trained = torch.optim.AdamW([parameter], fused=True)
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    keep_saved_types(optimizer)
    optimizer.load_state_dict(trained.state_dict())
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (None, False)


@pytest.mark.parametrize("warmup", [-0.1, 1.0])
def test_warmup_is_a_share(warmup: float) -> None:
    with pytest.raises(ValueError, match="share of all steps"):
        rates(10, warmup=warmup)


def test_singular_values_come_near_one_and_their_vectors_stay() -> None:
    """U S V' becomes U S' V', for wide matrices and for tall ones."""
    for shape in ((8, 30), (30, 8)):
        matrix = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        inner = left.T @ orthogonal(matrix[None], iterations=5)[0] @ right.T
        torch.testing.assert_close(inner, torch.diag(inner.diag()), rtol=0, atol=1e-12)
        assert 0.5 < inner.diag().min() < inner.diag().max() < 1.5


def network() -> nn.Module:
    torch.manual_seed(0)
    return build_resnet("tiny", stem="imagenet").double()


def test_filters_of_zeros_take_a_step() -> None:
    """As of a layer that is made to add nothing at first."""
    filters = nn.Parameter(torch.zeros(4, 3, 1, 1))
    filters.grad = torch.eye(4, 3)[:, :, None, None]
    MuonSGD([filters], lr=0.1).step()
    assert filters[:3].flatten(1).diag().less(-0.01).all()


@pytest.mark.parametrize("lr_biases", [None, 0.6])
def test_all_other_parameters_take_the_step_of_sgd(lr_biases: float | None) -> None:
    """Weight decay takes as much from biases that learn faster."""
    nets = network(), network()
    ours, others = ([parameter for parameter in net.parameters() if parameter.ndim != 4] for net in nets)
    groups: list[dict[str, Any]] = [{"params": [parameter for parameter in others if parameter.ndim == 2]}]
    groups += [{"params": [parameter for parameter in others if parameter.ndim == 1], "lr": lr_biases or 0.3}]
    groups[1]["weight_decay"] = 5e-4 * 0.3 / groups[1]["lr"]
    sgd = torch.optim.SGD(groups, lr=0.3, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for net, optimizer in zip(nets, (MuonSGD(ours, lr_others=0.3, lr_biases=lr_biases), sgd), strict=True):
        for step in range(3):
            images = torch.randn(6, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            net.zero_grad()
            F.cross_entropy(net(images), torch.arange(6)).backward()
            optimizer.step()
    for found, parameter in zip(ours, others, strict=True):
        torch.testing.assert_close(found, parameter, rtol=1e-12, atol=1e-12)


def test_gradients_may_lie_in_another_order_than_their_parameters() -> None:
    """channels_last changes nothing, neither that of both nor that of the parameters alone."""
    for layouts in ((torch.channels_last,) * 2, (torch.channels_last, torch.contiguous_format)):
        nets = network(), network().to(memory_format=layouts[0])
        for net in nets:
            torch.manual_seed(1)
            for parameter in net.parameters():
                gradient = torch.randn(parameter.shape, dtype=parameter.dtype)
                parameter.grad = gradient.to(memory_format=layouts[1]) if gradient.ndim == 4 else gradient
            MuonSGD(net.parameters()).step()
        for (name, value), parameter in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(parameter, value, rtol=1e-9, atol=1e-9, msg=name)
