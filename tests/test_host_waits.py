"""Between log points nothing makes the host wait for a device: the steps of every one-process mode on fake devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_devices import MODES, HostWaitsError, data_module, lit_resnet, train, validate
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lit_cifar.data.images import Batch
from lit_cifar.task.module import LitResNet

every_mode = pytest.mark.parametrize("strategy", MODES.values(), ids=MODES)
waiting = pytest.raises((DataDependentOutputException, DynamicOutputShapeException, HostWaitsError))


@every_mode
def test_a_training_step_waits_for_nothing(strategy: Callable[[], Any]) -> None:
    train(strategy(), lit_resnet(), data_module(cutout=8))


@every_mode
def test_a_validation_step_waits_for_nothing(strategy: Callable[[], Any]) -> None:
    validate(strategy(), lit_resnet(), data_module())


# ---------------------------------------------------------------- planted mistakes


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "bool": lambda loss: bool(loss > 0),
    "tolist": lambda loss: loss.tolist(),
    "bincount": lambda loss: torch.bincount(loss.long().reshape(1)),
    "nonzero": lambda loss: loss.nonzero(),
    "a copy to the host": lambda loss: loss.cpu(),
    "a copy that is read too early": lambda loss: loss.to("cpu", non_blocking=True),
    "a copy to the device": lambda loss: torch.ones(()).to(loss.device),
    "a number to the device": lambda loss: torch.tensor(1.0, device=loss.device),
    "a copy in place": lambda loss: loss.detach().clone().copy_(torch.ones(())),
}


class Waits(LitResNet):
    wait: Callable[[Tensor], Any]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            self.wait(loss.detach())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = super().validation_step(batch, batch_idx)
        if batch_idx == 3:
            self.wait(logits.sum())
        return logits


@every_mode
@pytest.mark.parametrize("run", [train, validate])
def test_a_step_that_reads_a_number_is_caught(strategy: Callable[[], Any], run: Callable[..., None]) -> None:
    module = Waits("tiny", stem="imagenet")
    module.wait = WAITS["item"]
    with waiting:
        run(strategy(), module, data_module())


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_every_way_to_wait_is_caught(wait: Callable[[Tensor], Any]) -> None:
    module = Waits("tiny", stem="imagenet")
    module.wait = wait
    with waiting:
        validate(MODES["single"](), module, data_module())
