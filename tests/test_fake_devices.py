"""What the one-process modes put where and for what the host waits, on fake devices: no test needs a GPU to see it.

They compute nothing, are called `meta:0`, `meta:1` and so on, and stand beside a real host. torch's `FakeTensorMode`
knows of a tensor there its shape, its type and where it is, and an operator refuses tensors of two devices as CUDA
does. Fake `cuda:N` fails in backward where there is no CUDA, fake `cpu:N` lets a tensor of the host pass.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loops import evaluation_loop, fit_loop
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.optim import Adagrad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lit_cifar.strategies.mp
from lit_cifar.checkpoint.callbacks import StepBoundary
from lit_cifar.data import Augment, CIFAR10DataModule, datamodule
from lit_cifar.data.images import Batch
from lit_cifar.models.partition import Partition
from lit_cifar.reporting.figures import EvaluationFigures
from lit_cifar.reporting.run_report import RunReport
from lit_cifar.strategies import DataParallelStrategy, LayerParallelStrategy
from lit_cifar.strategies.mp import StagedForward, StagedStrategy
from lit_cifar.task.callbacks import default_callbacks
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.modes import SILENT


class HostWaitsError(Exception):
    """The host would wait for a device, or read what has not arrived from there."""


class DoneError(Exception):
    """As many steps as were asked for have been taken."""


class FakeDevices(TorchDispatchMode):
    """Sends what concerns a fake device to `FakeTensorMode`; all else is computed.

    Numbers on a fake device cannot be read at all: torch raises `DataDependentOutputException`, and for an output whose
    size depends on them `DynamicOutputShapeException`.

    Attributes:
        steady: Whether also to refuse copies between host and device that are not `non_blocking`, as
            `torch.cuda.set_sync_debug_mode("error")` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steady = False
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not any(map(_is_fake, leaves)):  # `measure` of lit_cifar.models.partition uses the plain meta device
            return func(*args, **(kwargs or {}))
        # Elsewhere than in inference mode torch takes it apart before.
        if torch.is_inference_mode_enabled() and func.namespace == "aten" and func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        waits = _copies(func, leaves, kwargs or {})
        if waits in ("too early", "waits" if self.steady else ""):
            self.steady = False  # where an error ends a run, it may copy
            raise HostWaitsError(f"{func} of {[leaf for leaf in leaves if isinstance(leaf, FakeTensor)]}")
        _refuse_to_write_elsewhere(func, args, leaves)
        with self._mode:
            return func(*args, **(kwargs or {}))


def _refuse_to_write_elsewhere(func: Any, args: Any, leaves: list[Any]) -> None:
    """As CUDA does, in inference mode too, where `FakeTensorMode` would let it pass."""
    if not func._schema.is_mutable or func.overloadpacket is torch.ops.aten.copy_ or not isinstance(args[0], Tensor):
        return
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # A scalar of the host may be read anywhere.
    devices = {args[0].device, *(tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu")}
    if len(devices) > 1:
        raise RuntimeError(f"{func} of tensors on more than one device: {devices}")


@contextmanager
def fake_devices() -> Iterator[FakeDevices]:
    """Let there be some."""
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    # `Module.to` cannot put a fake tensor into a parameter that is there.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with FakeDevices() as devices, _Numbers():
            yield devices
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


class _Numbers(TorchFunctionMode):
    """Sends numbers to a device by a copy, as CUDA gets them; torch would make a plain meta tensor at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).index is not None:
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
        return func(*args, **(kwargs or {}))


def _is_fake(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.index is not None)


def _copies(func: Any, leaves: list[Any], kwargs: dict[str, Any]) -> str | None:
    """What is wrong with a copy between host and device: the host waits for it, or reads it too early."""
    if func.overloadpacket not in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
        return None
    tensors = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]
    source, target = (tensors[0], kwargs.get("device")) if len(tensors) == 1 else (tensors[1], tensors[0])
    if target is None or source.type == target.type:
        return None
    if not (kwargs.get("non_blocking") or any(leaf is True for leaf in leaves)):
        return "waits"
    return "too early" if target.type == "cpu" else None


class FakeAccelerator(CPUAccelerator):
    """As many fake devices as a Trainer asks for."""

    def setup_device(self, device: torch.device) -> None: ...

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("meta", index) for index in range(int(devices))]


# "single" is what Lightning chooses where a Trainer has one device.
MODES: dict[str, Any] = {
    "single": lambda: SingleDeviceStrategy(torch.device("meta", 0)),
    "dp": DataParallelStrategy,  # here all replicas are on the first device, as on the CPU
    "mp": LayerParallelStrategy,
    "mp with microbatches": lambda: LayerParallelStrategy(num_stages=4, num_microbatches=2),
}


class _Steps(L.Callback):
    """Ends the run after four steps, of which the last two are steady."""

    def __init__(self, devices: FakeDevices) -> None:
        self.devices = devices

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._taken(trainer.global_step)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._taken(batch_idx + 1)

    def _taken(self, num_steps: int) -> None:
        self.devices.steady = 2 <= num_steps < 4
        if num_steps == 4:
            raise DoneError


class _Boundary(StepBoundary):
    """The step boundary between two agreements, in which processes wait for each other."""

    def _agree(self, trainer: L.Trainer) -> tuple[int, bool]:
        self._steps_left = 1000
        return 0, False


def data_module(**settings: Any) -> CIFAR10DataModule:
    """Four batches to train on and four to validate with."""
    sizes: dict[str, Any] = {"num_train": 64, "val_size": 32, "batch_size": 8, "eval_batch_size": 8}
    data = CIFAR10DataModule(dataset="synthetic", **sizes | settings)
    data.setup("fit")  # on the host
    return data


def lit_resnet(**settings: Any) -> LitResNet:
    """A small network."""
    return LitResNet("tiny", stem="imagenet", **settings)


def train(strategy: Any, module: Any, data: Any, **settings: Any) -> None:
    """Four optimizer steps, in the last two of which nothing may make the host wait."""
    with _trainer(strategy, **settings) as trainer:
        trainer.fit(module, data)


def validate(strategy: Any, module: Any, data: Any) -> None:
    """Four batches of validation, in the last two of which nothing may make the host wait."""
    with _trainer(strategy) as trainer:
        trainer.validate(module, data, verbose=False)


@contextmanager
def _trainer(strategy: Any, **settings: Any) -> Iterator[L.Trainer]:
    """A Trainer with the command line's callbacks, on two fake devices; what it has begun must end with `DoneError`.

    One device has no room for the images, two have.
    """
    without = (StepBoundary, LearningRateMonitor, RunReport)  # `_Boundary` instead; they need loggers
    callbacks = [callback for callback in default_callbacks() if not isinstance(callback, without)]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    has_room = not isinstance(strategy, SingleDeviceStrategy)
    room = patch.object(datamodule, "has_room", lambda *_: has_room)
    with fake_devices() as devices, patch.dict(os.environ), room:
        settings |= SILENT | {"num_sanity_val_steps": 0, "log_every_n_steps": 1000, "max_epochs": 1}
        settings["callbacks"] = [_Boundary(), *callbacks, EvaluationFigures(), _Steps(devices)]
        settings["devices"] = 2 if has_room else 1
        trainer = L.Trainer(strategy=strategy, accelerator=FakeAccelerator(), **settings)
        trainer.strategy.teardown = lambda: None  # `Module.cpu` cannot take fake tensors out of parameters
        try:
            # Lightning would read from a device how many batches each process has.
            with patch.object(fit_loop, "has_len_all_ranks"), patch.object(evaluation_loop, "has_len_all_ranks"):
                yield trainer
        except DoneError:
            return
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    raise AssertionError("the run ended before its steps were taken")


waiting = pytest.raises((DataDependentOutputException, DynamicOutputShapeException, HostWaitsError))


@pytest.mark.parametrize("mode", MODES)
def test_training_finds_everything_in_its_place_and_waits_for_nothing(mode: str) -> None:
    """Clipped, with an optimizer whose state is there before the first step; one device has the other settings."""
    if mode == "single":
        train(MODES[mode](), lit_resnet(), data_module())
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
        stages = [stage.to(device) for stage, device in zip(partition.modules(network), devices, strict=True)]
        logits = StagedForward(stages, devices, num_microbatches=2)(torch.zeros(4, 3, 32, 32, device=devices[0]))
        assert logits.device == devices[0]


MISPLACED: dict[str, tuple[Any, str, Any]] = {
    # As Lightning's own strategies do: the whole module on the root device.
    "a stage": (StagedStrategy, "model_to_device", lambda self: self.model.to(self.root_device)),
    # Where Lightning has put Adagrad's sums when training begins.
    "an optimizer's state": (lit_cifar.strategies.mp, "follow_parameters", lambda optimizer: None),
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


@pytest.mark.parametrize(("run", "mode", "way"), [(train, "mp", "item"), *((validate, "single", way) for way in WAITS)])
def test_every_way_to_wait_is_caught(run: Callable[..., None], mode: str, way: str) -> None:
    module = Waits("tiny", stem="imagenet")
    module.wait = WAITS[way]
    with waiting:
        run(MODES[mode](), module, data_module())
