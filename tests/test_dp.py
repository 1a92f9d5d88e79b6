"""`dp`: how a batch is cut, what the replicas compute, what a Trainer does with them, and what is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from short_fits import data, fit, short
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar import LitResNet
from lit_cifar.models import build_resnet
from lit_cifar.strategies.dp import EmulatedReplicas, _DataParallel, in_context_of_caller, replica_of, replicate

pytestmark = short

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def lit() -> LitResNet:
    torch.manual_seed(0)
    return LitResNet("tiny", stem="imagenet")


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return build_resnet("tiny", stem="imagenet")


def twin(network: nn.Module) -> nn.Module:
    other = small_resnet().to(next(network.parameters()))
    other.load_state_dict(network.state_dict())
    return other


def images_of(num: int, dtype: torch.dtype = torch.float32) -> Tensor:
    # From 33 x 33 the last blocks see 2 x 2 values, so that a chunk of one sample still has a variance.
    return torch.randn(num, 3, 33, 33, dtype=dtype, generator=torch.Generator().manual_seed(num))


def labels_of(num: int) -> Tensor:
    return torch.arange(num) % 10


# ---------------------------------------------------------------- how a batch is cut


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 7])
def test_replica_of_is_the_rule_of_chunk(num_replicas: int) -> None:
    for num_samples in (*range(9), 13, 128):
        chunks = torch.zeros(num_samples).chunk(num_replicas)
        expected = [replica for replica, chunk in enumerate(chunks) for _ in chunk]
        assert replica_of(num_samples, num_replicas=num_replicas).tolist() == expected


# ---------------------------------------------------------------- what the replicas compute


@pytest.mark.parametrize(("num_samples", "num_replicas"), [(8, 2), (7, 3), (5, 4), (4, 1)])
def test_virtual_replicas_equal_separate_networks(num_samples: int, num_replicas: int) -> None:
    network = small_resnet().double().train()
    images, labels = images_of(num_samples, torch.float64), labels_of(num_samples)
    copies = [twin(network).train() for _ in images.chunk(num_replicas)]
    expected = torch.cat([copy(chunk) for copy, chunk in zip(copies, images.chunk(num_replicas), strict=True)])
    F.cross_entropy(expected, labels).backward()
    output = EmulatedReplicas(network, num_replicas=num_replicas)(images)
    F.cross_entropy(output, labels).backward()
    torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-13)
    for parameter, *others in zip(network.parameters(), *(copy.parameters() for copy in copies), strict=True):
        torch.testing.assert_close(parameter.grad, sum(other.grad for other in others), rtol=1e-12, atol=1e-12)
    for buffer, other in zip(network.buffers(), copies[0].buffers(), strict=True):
        torch.testing.assert_close(buffer, other)


def test_all_replicas_start_from_the_buffers_before_the_step() -> None:
    class AddsItsCount(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += len(x)
            return x + self.count

    network = AddsItsCount()
    output = EmulatedReplicas(network, num_replicas=3)(torch.zeros(5))
    assert output.tolist() == [2, 2, 2, 2, 1]
    assert network.count == 2, "replica 0's buffer stays, the others' are thrown away"


@pytest.mark.parametrize("num_samples", [0, 1, 2])
def test_evaluation_of_batches_smaller_than_the_replicas(num_samples: int) -> None:
    network = small_resnet().eval()
    images = images_of(num_samples)
    with torch.inference_mode():
        output = EmulatedReplicas(network, num_replicas=4)(images)
        torch.testing.assert_close(output, network(images), rtol=1e-5, atol=1e-5)
    assert output.shape == (num_samples, 10)


@pytest.mark.parametrize("inference", [True, False])
def test_a_thread_inherits_autocast_type_and_mode(inference: bool) -> None:
    layer, found = nn.Linear(2, 2), []

    def probe(x: Tensor) -> None:
        found.append((layer(x).dtype, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    mode = torch.inference_mode() if inference else torch.no_grad()
    # float16 is not the CPU's default autocast type, so a thread that loses it computes in bfloat16.
    with mode, torch.autocast("cpu", dtype=torch.float16):
        thread = threading.Thread(target=in_context_of_caller(probe, device_type="cpu"), args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
    assert found == [(torch.float16, inference, False)]


def test_the_threads_of_data_parallel_inherit_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_threads(self: Any, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        with ThreadPoolExecutor(1) as pool:
            return [*pool.map(lambda call: call(), replicas)]

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", in_threads)
    with torch.inference_mode():
        assert _DataParallel(nn.Linear(2, 2)).parallel_apply([torch.is_inference_mode_enabled], [()], [{}]) == [True]


# ---------------------------------------------------------------- under a Trainer


class Saves(L.Callback):
    """While replicas run."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        assert pl_module._runner is not None
        trainer.save_checkpoint(f"{trainer.default_root_dir}/dp.ckpt")


def test_a_checkpoint_has_the_keys_of_one_device_and_is_evaluated_alike(tmp_path: Path) -> None:
    module = lit()
    trainer = fit(module, tmp_path, strategy="dp", devices=2, callbacks=[Saves()], max_steps=1)
    assert module._runner is None, "teardown drops the runner"
    checkpoint = torch.load(tmp_path / "dp.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == set(lit().network.state_dict())
    alone = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    found, expected = (each.validate(module, data(), verbose=False)[0] for each in (trainer, alone))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_setup_that_fails_keeps_its_error_and_is_torn_down(tmp_path: Path) -> None:
    def no_optimizer(params: Any) -> Any:
        raise LookupError("no such optimizer")

    module = LitResNet("tiny", stem="imagenet", optimizer=no_optimizer)
    with pytest.raises(LookupError, match="no such optimizer"):
        fit(module, tmp_path, strategy="dp", devices=2)
    assert module._runner is None


# ---------------------------------------------------------------- on CUDA; one device can hold several replicas


@needs_cuda
@pytest.mark.parametrize("num_samples", [0, 1, 5])
def test_device_replicas_evaluate_small_batches(num_samples: int) -> None:
    """In the type of autocast; `test_gpu` trains."""
    network = small_resnet().cuda().eval()
    images = images_of(num_samples).cuda()
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        output = replicate(network, [torch.device("cuda", 0)] * 3)(images)
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output, network(images), rtol=0.05, atol=0.05)
