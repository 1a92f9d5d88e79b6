"""`dp`: how a batch is cut, what the replicas compute, what a Trainer does with them, and what is refused."""

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel.scatter_gather import scatter
from torch.utils.data import DataLoader, TensorDataset

import lit_cifar.strategies
from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.errors import ConfigError
from lit_cifar.models import build_resnet
from lit_cifar.strategies import DataParallelStrategy
from lit_cifar.strategies.dp import EmulatedReplicas, _DataParallel, in_context_of_caller, replica_of, replicate

# The first: Lightning 2.6 asks torch 2.15's pytree in a deprecated way. The rest is Lightning's advice to users about
# loaders without workers, unused validation steps and few batches.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


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


class Lit(L.LightningModule):
    """The least that dp runs: a network, a runner, a loss on the whole batch's output."""

    def __init__(self) -> None:
        super().__init__()
        self.network = small_resnet()
        self._runner: Any = None
        self.seen: list[Tensor] = []

    def use_runner(self, runner: Any) -> None:
        self._runner = runner

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images) if self._runner is None else self._runner(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.seen.append(logits.detach())
        self.log("val/loss", logits.sum())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(self(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader(num: int, *, batch_size: int, dtype: torch.dtype = torch.float32) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(images_of(num, dtype), labels_of(num)), batch_size=batch_size)


def dp_trainer(devices: int = 2, **kwargs: Any) -> L.Trainer:
    return L.Trainer(strategy="dp", devices=devices, accelerator="cpu", **{**QUIET, **kwargs})


# ---------------------------------------------------------------- how a batch is cut


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_samples", [0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 128])
def test_replica_of_is_the_rule_of_chunk(num_samples: int, num_replicas: int) -> None:
    replicas = replica_of(num_samples, num_replicas=num_replicas)
    chunks = torch.zeros(num_samples).chunk(num_replicas)
    expected = [replica for replica, chunk in enumerate(chunks) for _ in chunk]
    assert replicas.dtype == torch.int64
    assert replicas.tolist() == expected


@needs_cuda
@pytest.mark.parametrize("num_samples", [1, 5, 8])
def test_replica_of_is_the_rule_of_scatter(num_samples: int) -> None:
    chunks = scatter(torch.zeros(num_samples, device="cuda"), [0, 0, 0])
    assert replica_of(num_samples, num_replicas=3).bincount().tolist() == [len(chunk) for chunk in chunks]


# ---------------------------------------------------------------- what the replicas compute


def per_chunk(network: nn.Module, images: Tensor, labels: Tensor, num_replicas: int) -> tuple[Tensor, nn.Module]:
    """Gradients and output by hand: each chunk through a copy of its own, the copies' gradients added up.

    Returns:
        The gathered output and the copy that ran chunk 0, which carries the summed gradients.
    """
    copies = [twin(network).train() for _ in images.chunk(num_replicas)]
    output = torch.cat([copy(chunk) for copy, chunk in zip(copies, images.chunk(num_replicas), strict=True)])
    F.cross_entropy(output, labels).backward()
    for parameters in zip(*(copy.parameters() for copy in copies), strict=True):
        parameters[0].grad = sum(parameter.grad for parameter in parameters)
    return output.detach(), copies[0]


def assert_same_training(network: nn.Module, expected: nn.Module, *, tolerance: float) -> None:
    pairs = zip(network.named_parameters(), expected.parameters(), strict=True)
    for (name, parameter), other in pairs:
        scale = other.grad.abs().max()
        assert (parameter.grad - other.grad).abs().max() <= tolerance * scale, name
    for (name, buffer), other in zip(network.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize(("num_samples", "num_replicas"), [(8, 2), (7, 3), (5, 4), (4, 1)])
def test_virtual_replicas_equal_separate_networks(
    num_samples: int, num_replicas: int, dtype: torch.dtype, tolerance: float
) -> None:
    network = small_resnet().to(dtype).train()
    images, labels = images_of(num_samples, dtype), labels_of(num_samples)
    expected_output, expected = per_chunk(network, images, labels, num_replicas)

    output = EmulatedReplicas(network, num_replicas=num_replicas)(images)
    F.cross_entropy(output, labels).backward()

    torch.testing.assert_close(output.detach(), expected_output, rtol=tolerance, atol=tolerance)
    assert_same_training(network, expected, tolerance=tolerance)


def test_replicas_differ_from_one_device_by_batchnorm_alone() -> None:
    network, images = small_resnet(), images_of(8)
    divided = EmulatedReplicas(network, num_replicas=2)
    assert not torch.allclose(divided(images), twin(network).train()(images), atol=1e-3)
    network.eval()
    torch.testing.assert_close(divided(images), network(images), rtol=1e-5, atol=1e-5)


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


def test_replicate_needs_no_module() -> None:
    runner = replicate(small_resnet(), [CPU, CPU])
    assert not isinstance(runner, nn.Module), "as an attribute of a module it would change the checkpoint's keys"


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


def test_registered_once_and_reloadable() -> None:
    assert StrategyRegistry["dp"]["strategy"] is DataParallelStrategy
    importlib.reload(lit_cifar.strategies)
    assert StrategyRegistry.available_strategies().count("dp") == 1


def test_batch_split_is_known_before_fit() -> None:
    trainer = dp_trainer(devices=3)
    assert BatchSplit.of(trainer.strategy) == BatchSplit(dp_size=1, dp_rank=0, replicas_per_rank=3)
    assert trainer.strategy.replica_of(4).tolist() == [0, 0, 1, 1]
    assert (trainer.world_size, trainer.global_rank, trainer.is_global_zero) == (1, 0, True)
    assert not trainer._accelerator_connector.is_distributed, "Lightning would divide the data among processes"


def test_one_process_communicates_as_a_single_device_does() -> None:
    dp, single = dp_trainer().strategy, SingleDeviceStrategy()
    tensor = torch.arange(3)
    for strategy in (dp, single):
        assert strategy.all_gather(tensor) is tensor
        assert strategy.reduce(tensor, reduce_op="sum") is tensor
        assert strategy.broadcast(tensor) is tensor
        assert strategy.reduce_boolean_decision(False) is False
        strategy.barrier()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("devices", [1, 3])
def test_every_precision_trains_and_evaluates(precision: Any, devices: int) -> None:
    module = Lit()
    before = module.network.conv1.weight.detach().clone()
    trainer = dp_trainer(devices, max_epochs=1, precision=precision, num_sanity_val_steps=0)
    trainer.fit(module, loader(5, batch_size=3), loader(4, batch_size=3))
    assert [len(logits) for logits in module.seen] == [3, 1]
    assert all(logits.isfinite().all() for logits in module.seen)
    assert (module.seen[0].dtype == torch.bfloat16) == (precision != "32-true")
    assert not torch.equal(module.network.conv1.weight, before)


def test_checkpoint_has_the_keys_of_one_device(tmp_path: Path) -> None:
    path = tmp_path / "dp.ckpt"

    class Saves(Lit):
        def on_train_batch_end(self, *args: Any) -> None:
            assert self._runner is not None
            self.trainer.save_checkpoint(path)

    module = Saves()
    trainer = dp_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, loader(4, batch_size=4))
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint["state_dict"]) == set(Lit().state_dict())
    assert module._runner is None, "teardown drops the runner"

    dp_trainer(devices=3).test(module, loader(5, batch_size=5), verbose=False)
    divided, module.seen = module.seen, []
    L.Trainer(accelerator="cpu", devices=1, **QUIET).test(module, loader(5, batch_size=5), verbose=False)
    torch.testing.assert_close(divided, module.seen, rtol=1e-5, atol=1e-5)


def test_a_setup_that_fails_keeps_its_error_and_is_torn_down() -> None:
    class NoOptimizer(Lit):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            raise LookupError("no such optimizer")

    module = NoOptimizer()
    with pytest.raises(LookupError, match="no such optimizer"):
        dp_trainer(max_steps=1).fit(module, loader(4, batch_size=4))
    assert module._runner is None


# ---------------------------------------------------------------- what is refused


class ClusterOfTwo(LightningEnvironment):
    """An environment in which somebody else has started two processes."""

    def world_size(self) -> int:
        return 2


def test_two_started_processes_are_refused_while_the_trainer_is_made() -> None:
    with pytest.raises(ConfigError, match="2 were started") as caught:
        dp_trainer(plugins=[ClusterOfTwo()])
    assert "Start it directly" in caught.value.remedy
    assert len(str(caught.value).splitlines()) <= 5


def test_torchrun_is_refused_even_with_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun[\s\S]*--trainer.strategy=ddp"):
        dp_trainer()


def test_other_accelerators_are_refused() -> None:
    strategy = DataParallelStrategy(parallel_devices=[torch.device("mps", 0)])
    with pytest.raises(ConfigError, match="not on mps"):
        strategy._configure_launcher()


def test_a_module_without_a_runner_is_refused() -> None:
    class Plain(L.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> None: ...

    with pytest.raises(ConfigError, match="Plain has no such pair"):
        dp_trainer(max_steps=1).fit(Plain(), loader(4, batch_size=4))


# ---------------------------------------------------------------- on CUDA; one device can hold several replicas


@needs_cuda
@pytest.mark.parametrize(("num_samples", "num_replicas"), [(8, 1), (8, 2), (7, 3)])
def test_device_replicas_equal_virtual_ones(num_samples: int, num_replicas: int) -> None:
    network = small_resnet().to("cuda", torch.float64).train()
    images, labels = images_of(num_samples, torch.float64).cuda(), labels_of(num_samples).cuda()
    expected = twin(network).train()
    F.cross_entropy(EmulatedReplicas(expected, num_replicas=num_replicas)(images), labels).backward()

    output = replicate(network, [torch.device("cuda", 0)] * num_replicas)(images)
    F.cross_entropy(output, labels).backward()
    assert_same_training(network, expected, tolerance=1e-10)


@needs_cuda
@pytest.mark.parametrize("num_samples", [0, 1, 5])
def test_device_replicas_evaluate_small_batches(num_samples: int) -> None:
    network = small_resnet().cuda().double().eval()
    images = images_of(num_samples, torch.float64).cuda()
    with torch.inference_mode():
        output = replicate(network, [torch.device("cuda", 0)] * 3)(images)
        torch.testing.assert_close(output, network(images))


@needs_cuda
def test_device_replicas_keep_the_autocast_type() -> None:
    network = small_resnet().cuda().train()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = replicate(network, [torch.device("cuda", 0)] * 2)(images_of(4).cuda())
    assert output.dtype == torch.bfloat16


@needs_cuda
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_fit_on_cuda(num_replicas: int) -> None:
    strategy = DataParallelStrategy(parallel_devices=[torch.device("cuda", 0)] * num_replicas)
    module = Lit()
    trainer = L.Trainer(strategy=strategy, accelerator="gpu", devices=1, max_epochs=1, precision="bf16-mixed", **QUIET)
    trainer.fit(module, loader(8, batch_size=4), loader(5, batch_size=4))
    assert BatchSplit.of(strategy).num_replicas == num_replicas
    assert all(logits.isfinite().all() for logits in module.seen)
