"""What the one-process modes put where, on fake devices: no test needs a GPU to see a tensor on the wrong one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fake_devices import MODES, data_module, fake_devices, lit_resnet, train
from torch.optim import Adagrad, Adam
from torchmetrics import MeanMetric

import lit_cifar.strategies.mp
from lit_cifar.models.blocks import Partition
from lit_cifar.strategies.mp import StagedRunner, StagedStrategy
from lit_cifar.task.module import LitResNet

IMAGE = (3, 32, 32)

STAGED = [mode for mode in MODES if "mp" in mode]
every_mode = pytest.mark.parametrize("strategy", MODES.values(), ids=MODES)
staged_modes = pytest.mark.parametrize("strategy", [MODES[mode] for mode in STAGED], ids=STAGED)
misplaced = pytest.raises(RuntimeError, match="device")  # FakeTensorDeviceMismatchError is one


@every_mode
def test_training_finds_everything_in_its_place(strategy: Callable[[], Any]) -> None:
    """Clipped, the images in host memory; `test_host_waits` has resident images, and momentum."""
    module = lit_resnet(optimizer=partial(Adam, lr=0.1))
    train(strategy(), module, data_module(resident="host"), gradient_clip_val=1.0)


@staged_modes
def test_a_state_of_before_the_first_step_follows_its_parameter(strategy: Callable[[], Any]) -> None:
    train(strategy(), lit_resnet(optimizer=partial(Adagrad, lr=0.1)), data_module())


def test_the_host_waits_for_what_a_stage_of_its_own_is_going_to_read() -> None:
    with fake_devices(), torch.no_grad():
        network, devices = lit_resnet().network, [torch.device("meta", 0), torch.device("cpu")]
        partition = Partition.of(network, IMAGE, num_stages=2)
        stages = [stage.module(network).to(device) for stage, device in zip(partition.stages, devices, strict=True)]
        logits = StagedRunner(stages, devices, num_microbatches=2)(torch.zeros(4, 3, 32, 32, device=devices[0]))
        assert logits.device == devices[0]


# ---------------------------------------------------------------- planted mistakes


@every_mode
def test_a_metric_left_on_the_host_is_caught(strategy: Callable[[], Any]) -> None:
    """Its state is a scalar, which an operator takes from the host, but does not add to."""

    class Lit(LitResNet):
        def on_train_start(self) -> None:
            self.train_loss = MeanMetric(nan_strategy="disable")

    with misplaced:
        train(strategy(), Lit("tiny", stem="imagenet"), data_module())


@staged_modes
def test_a_stage_on_the_wrong_device_is_caught(strategy: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning's own strategies do: the whole module on the root device."""
    monkeypatch.setattr(StagedStrategy, "model_to_device", lambda self: self.model.to(self.root_device))
    with misplaced:
        train(strategy(), lit_resnet(), data_module())


@staged_modes
def test_an_optimizer_state_on_the_root_device_is_caught(
    strategy: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Lightning has put Adagrad's sums when training begins."""
    monkeypatch.setattr(lit_cifar.strategies.mp, "state_to_parameters", lambda optimizer: None)
    with misplaced:
        train(strategy(), lit_resnet(optimizer=partial(Adagrad, lr=0.1)), data_module())
