"""`mp`: the order of work, what is computed, where things are put, and whole runs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from commands import TINY, run_here
from comparing import assert_same_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.launch.signals import EXIT_STOPPED
from lit_cifar.models import build_resnet
from lit_cifar.models.blocks import Partition
from lit_cifar.strategies import LayerParallelStrategy
from lit_cifar.strategies.mp import StagedRunner, gpipe_order
from lit_cifar.task.module import LitResNet

IMAGE = (3, 32, 32)

CPU = torch.device("cpu")
META = torch.device("meta")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network_of() -> nn.Module:
    torch.manual_seed(0)
    return build_resnet("tiny", stem="imagenet").double()


def images_of(num: int) -> Tensor:
    return torch.randn(num, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- the order of work


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_every_microbatch_passes_every_stage_once_and_in_order(num_microbatches: int, num_stages: int) -> None:
    order = list(gpipe_order(num_microbatches=num_microbatches, num_stages=num_stages))
    assert len(set(order)) == len(order) == num_microbatches * num_stages
    for microbatch in range(num_microbatches):
        assert [stage for m, stage in order if m == microbatch] == list(range(num_stages))
    ticks = [microbatch + stage for microbatch, stage in order]
    assert ticks == sorted(ticks)
    # A copy to the next stage is issued before more work of this one.
    assert all(a[1] > b[1] for a, b in pairwise(order) if sum(a) == sum(b))


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("num_samples", [0, 1, 3, 5])
def test_evaluation_of_any_batch_size(num_samples: int) -> None:
    network = network_of().eval()
    images = images_of(num_samples)
    stages = Partition.of(network, IMAGE, num_stages=2).modules(network)
    runner = StagedRunner(stages, [CPU] * 2, num_microbatches=4)
    with torch.inference_mode():
        output = runner(images)
        torch.testing.assert_close(output, network(images), rtol=1e-12, atol=1e-12)
    assert output.shape == (num_samples, 10)


# ---------------------------------------------------------------- where things are put; "meta" stands for a device


def connected(*devices: torch.device, **kwargs: Any) -> tuple[LayerParallelStrategy, LitResNet]:
    module = LitResNet("tiny", stem="imagenet")
    strategy = LayerParallelStrategy(parallel_devices=list(devices), **kwargs)
    strategy.connect(module)
    return strategy, module


def test_stages_are_on_their_devices_and_the_rest_on_the_first() -> None:
    strategy, module = connected(META, CPU)
    strategy.model_to_device()
    assert module.device == META
    assert module.train_loss.device == META
    assert module.val_metrics.details["confusion"].confmat.device == META
    for stage, device in zip(strategy.partition.stages, (META, CPU), strict=True):
        assert {tensor.device for tensor in stage.module(module.network).state_dict().values()} == {device}


def test_a_loaded_optimizer_state_stays_with_its_parameter() -> None:
    strategy, module = connected(CPU, META)
    strategy.model_to_device()
    parameters = list(module.network.parameters())
    strategy.optimizers = [torch.optim.Adam(parameters)]
    saved = torch.optim.Adam([torch.zeros(p.shape, requires_grad=True) for p in parameters])
    for parameter in saved.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    strategy.load_optimizer_state_dict({"optimizer_states": [saved.state_dict()]})
    for parameter, state in strategy.optimizers[0].state.items():
        assert state["exp_avg"].device == state["exp_avg_sq"].device == parameter.device
        assert state["step"].device == CPU


@pytest.mark.parametrize(
    ("devices", "num_stages", "places"),
    [(2, None, [0, 1]), (2, 4, [0, 0, 1, 1]), (1, 3, [0, 0, 0]), (3, None, [0, 1, 2]), (1, None, [0])],
)
def test_stages_over_devices(devices: int, num_stages: int | None, places: list[int]) -> None:
    strategy = LayerParallelStrategy(num_stages=num_stages)
    L.Trainer(strategy=strategy, devices=devices, accelerator="cpu", logger=False, enable_checkpointing=False)
    strategy.connect(LitResNet("resnet10", stem="imagenet"))
    lines = strategy.split_lines()
    assert len(strategy.stage_devices) == len(lines)
    assert [line.split("  ")[1].strip() for line in lines] == [f"cpu {place}" for place in places]


# ---------------------------------------------------------------- whole runs


def fit(folder: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    shared = ["--trainer.precision=64-true", "--model.optimizer.lr=0.02", "--trainer.limit_val_batches=0"]
    result = run_here("fit", *TINY, *shared, *flags, f"--run_dir={folder}")
    assert result.status == status, result.stderr
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")


def test_one_device_and_mp_resume_each_other(tmp_path: Path) -> None:
    """Two epochs in one go, and both in part by two modes, optimizer and schedule included, are the same bits.

    In float32: Lightning loads a float64 checkpoint into a float32 network, and converts that.
    """
    mp, alone = ["--trainer.strategy=mp", "--trainer.devices=2"], ["--trainer.devices=1"]
    two_epochs = ["--trainer.precision=32-true", "--trainer.max_epochs=2"]
    stops = [
        "--last_checkpoint.every_n_steps=1",
        "--trainer.callbacks+=stopping.SignalAfter",
        "--trainer.callbacks.step=7",
    ]
    whole = fit(tmp_path / "whole", *alone, *two_epochs)
    for first, second in ((mp, alone), (alone, mp)):
        begun, ended = (tmp_path / f"{first[0]}-{part}" for part in ("begun", "ended"))
        fit(begun, *first, *two_epochs, *stops, status=EXIT_STOPPED)
        last = begun / "checkpoints" / "last.ckpt"
        assert_same_checkpoint(fit(ended, *second, *two_epochs, f"--ckpt_path={last}"), whole, tolerance=0)


def test_reduced_precision_trains_in_microbatches_between_named_cuts(tmp_path: Path) -> None:
    flags = ["--trainer.strategy=LayerParallelStrategy", "--trainer.strategy.num_microbatches=2", "--trainer.devices=2"]
    flags += ["--trainer.strategy.cuts=[layer4.0]", "--trainer.precision=bf16-true", "--data.num_train=48"]
    result = run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}")
    assert result.status == 0, result.stderr
    assert "layer4.0 to head" in result.stdout


# ---------------------------------------------------------------- on CUDA; one device can hold all stages


@needs_cuda
def test_stages_on_the_cpu_and_a_gpu_are_the_plain_network() -> None:
    """Two kinds of devices: every hand-over is a real copy."""
    devices = [torch.device("cuda", 0), CPU]
    plain, divided = network_of().train(), network_of().train()
    partition = Partition.of(divided, IMAGE, num_stages=2)
    stages = [stage.module(divided).to(device) for stage, device in zip(partition.stages, devices, strict=True)]
    images, labels = images_of(6), torch.arange(6)
    F.cross_entropy(plain(images), labels).backward()
    output = StagedRunner(stages, devices)(images.to(devices[0]))
    assert output.device == devices[0]
    F.cross_entropy(output, labels.to(devices[0])).backward()
    for one, other in zip(plain.parameters(), divided.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-9, atol=1e-9)
