"""`--virtual_replicas`: what the bits of one device on several need; that modes have them, `test_parity` shows."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from commands import TINY, last_checkpoint, run_here
from lightning.pytorch.strategies import SingleDeviceStrategy
from threads import on_ranks
from torch import Tensor, nn

from lit_cifar import CIFAR10DataModule
from lit_cifar.errors import ConfigError
from lit_cifar.strategies.mesh import _norm, clip_by_whole_norm
from lit_cifar.strategies.parts import VirtualParts
from lit_cifar.strategies.virtual_replicas import VirtualReplicas
from lit_cifar.task.metrics import MeanLoss
from lit_cifar.tools.modes import SILENT

# The last flag of a name counts. Of 58 images the last batch has 10, which are parts of 3, 3, 2 and 2.
FLAGS = [*TINY, "--virtual_replicas=4", "--data.num_train=74", "--data.eval_batch_size=8"]


def averages_of(rank: int, world_size: int) -> list[Tensor]:
    """Of every step, in which another parameter than in the one before gets no gradient."""
    network = nn.Sequential(nn.Linear(7, 31), nn.BatchNorm1d(31), nn.ReLU(), nn.Linear(31, 3))
    for index, parameter in enumerate(network.parameters()):  # threads share torch's generator
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    own, found = VirtualParts(4, num_processes=world_size), []
    own.take_gradients(network.parameters())
    for step in range(3):
        for index, parameter in enumerate(network.parameters()):
            parameter.requires_grad_(index != step)
        own.start_step(network.buffers())
        for place in own.places:
            generator = torch.Generator().manual_seed(100 * step + rank + place * world_size)
            with own.own_statistics():
                loss = network(torch.randn(5, 7, generator=generator)).square().sum()
            loss.backward()
        own.average()
        gradients = [parameter.grad for parameter in network.parameters() if parameter.requires_grad]
        assert None not in gradients
        found.append(torch.cat([tensor.flatten() for tensor in (*gradients, *network.buffers())]))
    return found


def test_four_processes_have_the_averages_of_one() -> None:
    alone = averages_of(0, world_size=1)
    for found in on_ranks(4, partial(averages_of, world_size=4)):
        assert [step.equal(expected) for step, expected in zip(found, alone, strict=True)] == [True] * 3


def test_losses_are_added_in_any_order() -> None:
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-5, 5).repeat(100)
    found = []
    for order in (losses, losses.flip(0), losses[torch.randperm(1000)]):
        metric = MeanLoss()
        for part in order.split(7):
            metric.update(part)
        found.append(metric.compute())
    assert found[0] == found[1] == found[2]
    assert float(found[0]) == pytest.approx(float(losses.double().mean()), rel=1e-6)
    metric.update(torch.tensor([float("nan")]))
    assert metric.compute().isnan()


@pytest.mark.parametrize("clip_val", [0.5, 1e3])
def test_gradients_are_clipped_as_torch_clips_them(clip_val: float) -> None:
    """And a stage without any takes part: Lightning takes a StopIteration for the end of the epoch."""
    clip_by_whole_norm(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1.0), clip_val, device=torch.device("cpu"))
    layers = [nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)) for _ in range(2)]
    for layer in layers:
        torch.manual_seed(0)
        for parameter in [*layer.parameters()][1:]:
            parameter.grad = torch.randn_like(parameter)
    clip_by_whole_norm(torch.optim.SGD(layers[0].parameters(), lr=1.0), clip_val, device=torch.device("cpu"))
    torch.nn.utils.clip_grad_norm_(layers[1].parameters(), clip_val)
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("value", "count", "norm"), [(1e-4, 10_000, 1e-2), (400.0, 4, 800.0)])
def test_the_norm_of_a_gradient_in_float16_has_no_squares_in_float16(value: float, count: int, norm: float) -> None:
    gradient = torch.full((count,), value, dtype=torch.float16)
    assert float(_norm(gradient)) == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize(
    ("deterministic", "benchmark", "remedy"),
    [
        (False, False, "pass --trainer.deterministic=true"),
        (True, True, "leave out one of the two"),
        (True, False, None),
    ],
)
def test_on_a_gpu_kernels_must_have_the_same_bits_each_time(
    deterministic: bool, benchmark: bool, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SingleDeviceStrategy, "root_device", torch.device("cuda", 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    data = CIFAR10DataModule(dataset="synthetic", batch_size=16, eval_batch_size=16)
    trainer = L.Trainer(accelerator="cpu", devices=1, **SILENT)
    with pytest.raises(ConfigError) if remedy else nullcontext() as refused:
        VirtualReplicas(4).check(trainer, data, None)
    assert refused is None or refused.value.remedy == remedy


@pytest.mark.slow
def test_every_part_of_a_scaled_loss_has_its_share_in_the_gradient(tmp_path: Path) -> None:
    """In 16-mixed, which torch has on the CPU as well, but Lightning not; the momentum of the first step."""
    scaled = ["MixedPrecision", "precision=16-mixed", "device=cpu", "scaler=torch.amp.GradScaler"]
    scaled += ["scaler.device=cpu", "scaler.init_scale=256"]
    found = []
    for flags in ([], [f"--trainer.plugins{'.' if '=' in flag else '='}{flag}" for flag in scaled]):
        run = tmp_path / str(len(found))
        run_here("fit", *FLAGS, "--trainer.precision=null", *flags, "--trainer.max_steps=1", f"--run_dir={run}")
        states = last_checkpoint(run)["optimizer_states"][0]["state"].values()
        found.append(torch.cat([state["momentum_buffer"].flatten() for state in states]))
    plain, of_scaled = found
    assert float((of_scaled - plain).norm() / plain.norm()) < 0.3  # without it 0.6, in float16 0.13
