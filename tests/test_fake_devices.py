"""What the one-process modes put where and for what the host waits, on fake devices: no test needs a GPU to see it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fake_devices import MODES, HostWaitsError, data_module, fake_devices, lit_resnet, train, validate
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.optim import Adagrad

import lit_cifar.strategies.mp
from lit_cifar.data import Augment
from lit_cifar.data.images import Batch
from lit_cifar.models.partition import Partition
from lit_cifar.strategies.mp import StagedForward, StagedStrategy
from lit_cifar.task.module import LitResNet

waiting = pytest.raises((DataDependentOutputException, DynamicOutputShapeException, HostWaitsError))


@pytest.mark.parametrize("mode", MODES)
def test_training_finds_everything_in_its_place_and_waits_for_nothing(mode: str) -> None:
    """Clipped, with an optimizer whose state is there before the first step; one device has the other settings."""
    if mode == "single":
        train(MODES[mode](), lit_resnet(), data_module(resident="host"))
    else:
        module = lit_resnet(optimizer=partial(Adagrad, lr=0.1))
        train(MODES[mode](), module, data_module(augment=Augment(cutout=8)), gradient_clip_val=1.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_validation_step_waits_for_nothing(mode: str) -> None:
    validate(MODES[mode](), lit_resnet(), data_module())


def test_the_host_waits_for_what_a_stage_of_its_own_is_going_to_read() -> None:
    with fake_devices(), torch.no_grad():
        network, devices = lit_resnet().network, [torch.device("meta", 0), torch.device("cpu")]
        partition = Partition.cut(network, (3, 32, 32), num_stages=2)
        stages = [stage.module(network).to(device) for stage, device in zip(partition.stages, devices, strict=True)]
        logits = StagedForward(stages, devices, num_microbatches=2)(torch.zeros(4, 3, 32, 32, device=devices[0]))
        assert logits.device == devices[0]


MISPLACED: dict[str, tuple[Any, str, Any]] = {
    # As Lightning's own strategies do: the whole module on the root device.
    "a stage": (StagedStrategy, "model_to_device", lambda self: self.model.to(self.root_device)),
    # Where Lightning has put Adagrad's sums when training begins.
    "an optimizer's state": (lit_cifar.strategies.mp, "state_to_parameters", lambda optimizer: None),
}


@pytest.mark.parametrize(("owner", "name", "mistake"), MISPLACED.values(), ids=MISPLACED)
def test_what_is_misplaced_is_caught(owner: Any, name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(RuntimeError, match="device"):  # FakeTensorDeviceMismatchError is one
        train(MODES["mp"](), lit_resnet(optimizer=partial(Adagrad, lr=0.1)), data_module())


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


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "nonzero": lambda loss: loss.nonzero(),
    "a copy to the host": lambda loss: loss.cpu(),
    "a copy that is read too early": lambda loss: loss.to("cpu", non_blocking=True),
    "a number to the device": lambda loss: torch.tensor(1.0, device=loss.device),
    "a copy in place": lambda loss: loss.detach().clone().copy_(torch.ones(())),
}


@pytest.mark.parametrize(
    ("run", "mode", "name"), [(train, "mp", "item"), *((validate, "single", name) for name in WAITS)]
)
def test_every_way_to_wait_is_caught(run: Callable[..., None], mode: str, name: str) -> None:
    module = Waits("tiny", stem="imagenet")
    module.wait = WAITS[name]
    with waiting:
        run(MODES[mode](), module, data_module())
