"""Stages on devices of one process: the order of work, what is computed, where things are put."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.models import build_resnet
from lit_cifar.models.ghost_batchnorm import normalise_apart
from lit_cifar.models.partition import Partition
from lit_cifar.strategies import LayerParallelStrategy
from lit_cifar.strategies.mp import StagedRunner, device_names, gpipe_order, state_to_parameters
from lit_cifar.task.module import LitResNet

IMAGE = (3, 32, 32)

CPU = torch.device("cpu")
META = torch.device("meta")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network_of(chunks: GhostBatches | None = None) -> nn.Module:
    torch.manual_seed(0)
    network = build_resnet("tiny", stem="imagenet").double()
    return network if chunks is None else normalise_apart(network, chunks)


def batch_of(num: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    # From 33 x 33 the last blocks see 2 x 2 values, so that a microbatch of one sample still has a variance.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, 33, 33, dtype=torch.float64, generator=generator), torch.arange(num) % 10


def staged(network: nn.Module, *, num_stages: int, num_microbatches: int, device: torch.device = CPU) -> StagedRunner:
    partition = Partition.of(network, IMAGE, num_stages=num_stages)
    stages = [stage.module(network) for stage in partition.stages]
    return StagedRunner(stages, [device] * num_stages, num_microbatches=num_microbatches)


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


def test_the_first_microbatch_is_sent_on_before_the_second_is_begun() -> None:
    assert list(gpipe_order(num_microbatches=2, num_stages=2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    order = list(gpipe_order(num_microbatches=3, num_stages=3))
    assert order[:3] == [(0, 0), (0, 1), (1, 0)]
    assert order[3:6] == [(0, 2), (1, 1), (2, 0)]


def test_a_runner_follows_the_order() -> None:
    issued: list[tuple[int, int]] = []

    def stage(index: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            issued.append((int(x[0]), index))
            return x

        return run

    stages: Any = [stage(index) for index in range(3)]
    assert StagedRunner(stages, [CPU] * 3, num_microbatches=4)(torch.arange(4)).tolist() == [0, 1, 2, 3]
    assert issued == list(gpipe_order(num_microbatches=4, num_stages=3))


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("num_stages", [1, 2, 6])
def test_one_microbatch_is_the_plain_network_bit_for_bit(num_stages: int) -> None:
    plain, divided = network_of().train(), network_of().train()
    images, labels = batch_of(6)
    outputs = [plain(images), staged(divided, num_stages=num_stages, num_microbatches=1)(images)]
    for output in outputs:
        F.cross_entropy(output, labels).backward()
    assert torch.equal(*outputs)
    for one, other in zip(plain.parameters(), divided.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(plain.buffers(), divided.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("num_samples", "num_stages", "num_microbatches"), [(8, 2, 4), (7, 3, 3), (2, 2, 4)])
def test_several_microbatches_are_one_device_with_chunked_batchnorm(
    num_samples: int, num_stages: int, num_microbatches: int
) -> None:
    """Four steps with momentum; 7 samples in 3 microbatches are 3, 2 and 2; 2 samples in 4 are two of one."""
    networks = [network_of(GhostBatches(num_microbatches=num_microbatches)), network_of()]
    runners = [networks[0], staged(networks[1], num_stages=num_stages, num_microbatches=num_microbatches)]
    optimizers = [torch.optim.SGD(network.train().parameters(), lr=0.01, momentum=0.9) for network in networks]
    for step in range(4):
        images, labels = batch_of(num_samples, seed=step)
        for runner, optimizer in zip(runners, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(runner(images), labels).backward()
            optimizer.step()
    states = [network.state_dict() for network in networks]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-12, atol=1e-12, msg=name)
    momenta = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for index, entry in momenta[0].items():
        torch.testing.assert_close(
            momenta[1][index]["momentum_buffer"], entry["momentum_buffer"], rtol=1e-12, atol=1e-12
        )


def test_microbatches_differ_from_the_whole_batch_by_batchnorm_alone() -> None:
    images, _ = batch_of(8)
    network = network_of()
    divided = staged(network, num_stages=2, num_microbatches=4)
    assert not torch.allclose(divided(images), network_of()(images), atol=1e-3)
    network.eval()
    torch.testing.assert_close(divided(images), network(images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_samples", [0, 1, 3, 5])
def test_evaluation_of_any_batch_size(num_samples: int) -> None:
    network = network_of().eval()
    images, _ = batch_of(num_samples)
    runner = staged(network, num_stages=2, num_microbatches=4)
    with torch.inference_mode():
        output = runner(images)
        torch.testing.assert_close(output, network(images), rtol=1e-12, atol=1e-12)
    assert output.shape == (num_samples, 10)


def test_a_runner_is_no_module() -> None:
    runner = staged(network_of(), num_stages=2, num_microbatches=1)
    assert not isinstance(runner, nn.Module), "as an attribute of a module it would change the checkpoint's keys"


# ---------------------------------------------------------------- where things are put; "meta" stands for a device


def connected(*devices: torch.device, **kwargs: Any) -> tuple[LayerParallelStrategy, LitResNet]:
    module = LitResNet("tiny", stem="imagenet")
    strategy = LayerParallelStrategy(parallel_devices=list(devices), **kwargs)
    strategy.connect(module)
    return strategy, module


def test_each_stage_is_put_on_its_device() -> None:
    strategy, module = connected(CPU, META)
    strategy.model_to_device()
    for stage, device in zip(strategy.partition.stages, (CPU, META), strict=True):
        assert {tensor.device for tensor in stage.module(module.network).state_dict().values()} == {device}
    assert {tensor.device for tensor in module.network.state_dict().values()} == {CPU, META}


def test_the_rest_of_the_module_is_on_the_root_device() -> None:
    strategy, module = connected(META, CPU)
    strategy.model_to_device()
    assert module.device == META
    assert module.train_loss.device == META
    assert module.val_metrics.details["confusion"].confmat.device == META
    assert module.network.fc.weight.device == CPU
    assert module.network.conv1.weight.device == META


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


def test_a_state_that_was_moved_away_is_brought_back() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device=META))]
    optimizer = torch.optim.Adagrad(parameters)
    optimizer.state[parameters[1]]["sum"] = torch.zeros(2)
    state_to_parameters(optimizer)
    assert [optimizer.state[parameter]["sum"].device for parameter in parameters] == [CPU, META]
    assert all(optimizer.state[parameter]["step"].device == CPU for parameter in parameters)


def test_virtual_devices_are_numbered() -> None:
    assert device_names([CPU, CPU], first=2) == ["cpu 2", "cpu 3"]
    assert device_names([torch.device("cuda", 5), torch.device("cuda", 7)]) == ["cuda 5", "cuda 7"]


# ---------------------------------------------------------------- on CUDA; one device can hold all stages


@needs_cuda
def test_stages_on_one_gpu_are_the_plain_network() -> None:
    device = torch.device("cuda", 0)
    network = network_of().to(device).eval()
    images = batch_of(7)[0].to(device)
    runner = staged(network, num_stages=3, num_microbatches=4, device=device)
    with torch.inference_mode():
        output = runner(images)
        torch.testing.assert_close(output, network(images), rtol=1e-10, atol=1e-10)


@needs_cuda
def test_stages_on_the_cpu_and_a_gpu_are_the_plain_network() -> None:
    """Two kinds of devices: every hand-over is a real copy."""
    devices = [torch.device("cuda", 0), CPU]
    plain, divided = network_of().train(), network_of().train()
    partition = Partition.of(divided, IMAGE, num_stages=2)
    stages = [stage.module(divided).to(device) for stage, device in zip(partition.stages, devices, strict=True)]
    images, labels = batch_of(6)
    F.cross_entropy(plain(images), labels).backward()
    output = StagedRunner(stages, devices)(images.to(devices[0]))
    assert output.device == devices[0]
    F.cross_entropy(output, labels.to(devices[0])).backward()
    for one, other in zip(plain.parameters(), divided.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-9, atol=1e-9)
