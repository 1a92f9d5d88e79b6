"""`16-mixed`: all processes leave out the same steps, and a pipeline scales by itself."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from short_fits import fit, short
from torch import Tensor

from lit_cifar import LitResNet
from lit_cifar.strategies import PipelineStrategy
from lit_cifar.strategies.pipeline import Pipeline

pytestmark = [
    short,
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # no step of the optimizer came before it
]


def scaled(init_scale: float = 1024.0) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))


@pytest.fixture
def another_has_overflowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All find the largest of what each has found."""
    all_reduce = dist.all_reduce

    def with_another(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        if op == dist.ReduceOp.MAX:
            tensor.fill_(1.0)
        return all_reduce(tensor, op, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", with_another)


@pytest.mark.parametrize("overflowed", [True, False])
@pytest.mark.parametrize("mode", ["pp", "fsdp2", "tp"])
def test_a_step_is_left_out_where_another_process_has_overflowed(
    mode: str, overflowed: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """On the CPU, where torch scales too, but Lightning not."""
    if overflowed:
        request.getfixturevalue("another_has_overflowed")
    model, precision = LitResNet("tiny", stem="imagenet"), scaled()
    before = model.network.fc.weight.detach().clone()
    fit(model, tmp_path, strategy=mode, plugins=[precision], max_steps=1)
    assert precision.scaler.get_scale() == (512.0 if overflowed else 1024.0)
    assert model.network.fc.weight.equal(before) == overflowed


@pytest.mark.usefixtures("another_has_overflowed")
@pytest.mark.parametrize("fused", [False, True])
def test_a_stage_without_gradients_takes_part_in_the_agreement(fused: bool, tmp_path: Path) -> None:
    """Its peers would wait for it; it learns from them that the scale has to be lowered."""
    model, precision = LitResNet("tiny", stem="imagenet"), scaled()
    model.optimization.make_optimizer = partial(torch.optim.SGD, lr=0.1, fused=fused)
    model.network.requires_grad_(False)
    fit(model, tmp_path, strategy="pp", plugins=[precision], max_steps=1)
    assert precision.scaler.get_scale() == 512.0


def test_a_pipeline_scales_the_loss_of_its_own_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled only when the gradients are handed over, small ones would have been lost in float16."""
    scales, train = [], Pipeline._forward_and_backward

    def noting(self: Pipeline, *args: Any) -> Any:
        scales.append(float(self._scale))
        return train(self, *args)

    monkeypatch.setattr(Pipeline, "_forward_and_backward", noting)
    fit(LitResNet("tiny", stem="imagenet"), tmp_path, strategy=PipelineStrategy(), plugins=[scaled(64.0)], max_steps=1)
    assert scales == [64.0]
