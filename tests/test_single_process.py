"""`dp`, `mp` and `ddp_mp`: how a batch is cut, in which order and where work is done; `test_parity` trains."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from short_fits import short
from torch import Tensor, nn

import lit_cifar.strategies.mp
from lit_cifar import LitResNet, internals
from lit_cifar.errors import ConfigError
from lit_cifar.models import build_resnet
from lit_cifar.models.partition import Partition
from lit_cifar.strategies import DataParallelStrategy, DDPLayerParallelStrategy, LayerParallelStrategy
from lit_cifar.strategies.dp import EmulatedReplicas, _DataParallel, in_context_of_caller
from lit_cifar.strategies.mp import StagedForward, gpipe_order
from lit_cifar.tools.modes import SILENT

pytestmark = short

CPU, META = torch.device("cpu"), torch.device("meta")


def trainer_of(mode: str) -> L.Trainer:
    return L.Trainer(strategy=mode, devices=2, accelerator="cpu", **SILENT)


def started_by_torchrun(monkeypatch: pytest.MonkeyPatch, *, processes: int) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in (variables | {"WORLD_SIZE": str(processes)}).items():
        monkeypatch.setenv(name, value)


def test_a_process_alone_communicates_as_a_single_device_does() -> None:
    trainer, tensor = trainer_of("mp"), torch.arange(3)
    assert (trainer.world_size, trainer.global_rank, trainer.is_global_zero) == (1, 0, True)
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert not trainer._accelerator_connector.is_distributed, "Lightning would divide the data among processes"
    for strategy in (trainer.strategy, SingleDeviceStrategy()):
        assert strategy.all_gather(tensor) is tensor
        assert strategy.reduce(tensor, reduce_op="sum") is tensor
        assert strategy.broadcast(tensor) is tensor
        assert strategy.reduce_boolean_decision(False) is False
        strategy.barrier()


@pytest.mark.parametrize(("mode", "instead"), [("dp", "ddp"), ("mp", "ddp_mp")])
def test_other_processes_are_refused(mode: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that somebody else has started, and even one of torchrun."""
    monkeypatch.setattr(LightningEnvironment, "world_size", lambda self: 2)
    says = rf"={mode} is one process, .*has started 2.*\n.*--trainer.strategy={instead}"
    with pytest.raises(ConfigError, match=says):
        trainer_of(mode)
    started_by_torchrun(monkeypatch, processes=1)
    with pytest.raises(ConfigError, match="torchrun"):
        trainer_of(mode)


@pytest.mark.parametrize(("mode", "lacks"), [("dp", "use_forward_fn"), ("mp", "use_forward_fn and no image_shape")])
def test_a_module_without_what_a_mode_needs_is_refused(mode: str, lacks: str) -> None:
    with pytest.raises(ConfigError, match=f"LightningModule has no network and no {lacks}\n"):
        trainer_of(mode).strategy.connect(L.LightningModule())


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 7])
def test_replica_of_is_the_rule_of_chunk(num_replicas: int) -> None:
    strategy = DataParallelStrategy(num_replicas=num_replicas)
    for num_samples in (*range(9), 13, 128):
        chunks = torch.zeros(num_samples).chunk(num_replicas)
        expected = [replica for replica, chunk in enumerate(chunks) for _ in chunk]
        assert strategy.replica_of(num_samples).tolist() == expected


def test_all_replicas_start_from_the_buffers_before_the_step() -> None:
    class AddsItsCount(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += len(x)
            return x + self.count

    network = AddsItsCount()
    assert EmulatedReplicas(network, num_replicas=3)(torch.zeros(5)).tolist() == [2, 2, 2, 2, 1]
    assert network.count == 2, "replica 0's buffer stays, the others' are thrown away"


@pytest.mark.parametrize("inference", [True, False])
def test_threads_of_data_parallel_inherit_autocast_and_mode(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)

    def in_threads(self: Any, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        with ThreadPoolExecutor(1) as pool:
            return [*pool.map(lambda call: call(), replicas)]

    def probe() -> tuple[torch.dtype, bool, bool]:
        return layer(torch.ones(1, 2)).dtype, torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", in_threads)
    on_cpu = partial(in_context_of_caller, device_type="cpu")
    monkeypatch.setattr("lit_cifar.strategies.dp.in_context_of_caller", on_cpu)
    mode = torch.inference_mode() if inference else torch.no_grad()
    # float16 is not the CPU's default autocast type, so a thread that loses it computes in bfloat16.
    with mode, torch.autocast("cpu", dtype=torch.float16):
        assert _DataParallel(layer).parallel_apply([probe], [()], [{}]) == [(torch.float16, inference, False)]


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


@pytest.mark.parametrize("num_samples", [0, 1, 3, 5])
def test_both_modes_evaluate_a_batch_of_any_size(num_samples: int) -> None:
    torch.manual_seed(0)
    network = build_resnet("tiny", stem="imagenet").double().eval()
    images, stages = torch.randn(num_samples, 3, 32, 32).double(), Partition.cut(network, (3, 32, 32), num_stages=2)
    staged = StagedForward(stages.modules(network), [CPU] * 2, num_microbatches=4)
    for forward_fn in (EmulatedReplicas(network, num_replicas=4), staged):
        with torch.inference_mode():
            output = forward_fn(images)
            torch.testing.assert_close(output, network(images), rtol=1e-12, atol=1e-12)
        assert output.shape == (num_samples, 10)


def test_what_an_optimizer_has_loaded_is_where_its_parameter_is() -> None:
    module, strategy = LitResNet("tiny", stem="imagenet"), LayerParallelStrategy(parallel_devices=[META, CPU])
    strategy.connect(module)
    strategy.model_to_device()
    parameters = list(module.network.parameters())
    strategy.optimizers = [torch.optim.Adam(parameters)]
    saved = torch.optim.Adam([torch.zeros(p.shape, requires_grad=True) for p in parameters])
    for parameter in saved.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    strategy.load_optimizer_state_dict({"optimizer_states": [saved.state_dict()]})
    assert {parameter.device for parameter in parameters} == {META, CPU}
    for parameter, state in strategy.optimizers[0].state.items():
        assert state["exp_avg"].device == state["exp_avg_sq"].device == parameter.device
        assert state["step"].device == CPU


@pytest.mark.parametrize(
    ("devices", "num_stages", "places"),
    [(2, None, [0, 1]), (2, 4, [0, 0, 1, 1]), (1, 3, [0, 0, 0]), (3, None, [0, 1, 2]), (1, None, [0])],
)
def test_stages_over_devices(devices: int, num_stages: int | None, places: list[int]) -> None:
    strategy = LayerParallelStrategy(num_stages=num_stages)
    L.Trainer(strategy=strategy, devices=devices, accelerator="cpu", **SILENT)
    strategy.connect(LitResNet("resnet10", stem="imagenet"))
    lines = strategy.split_lines()
    assert len(strategy.stage_devices) == len(lines)
    assert [line.split("  ")[1].strip() for line in lines] == [f"cpu {place}" for place in places]


def strategy_of(num_devices: int, *, rank: int = 0, **sizes: Any) -> Any:
    """A strategy in the state in which a Trainer has it when it checks the flags; each device is another one."""
    environment: Any = LightningEnvironment()
    environment.local_rank = lambda: rank
    environment.world_size = lambda: num_devices // sizes.get("num_stages", 2)
    devices = [torch.device("cuda", index) for index in range(num_devices)]
    return DDPLayerParallelStrategy(parallel_devices=devices, cluster_environment=environment, **sizes)


@pytest.mark.parametrize(
    ("num_devices", "num_stages", "of_ranks"),
    [(4, 2, [[0, 1], [2, 3]]), (2, 2, [[0, 1]]), (6, 3, [[0, 1, 2], [3, 4, 5]]), (2, 1, [[0], [1]])],
)
def test_processes_and_their_devices(
    num_devices: int, num_stages: int, of_ranks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which the strategy is about to change
    for rank, indices in enumerate(of_ranks):
        strategy = strategy_of(num_devices, rank=rank, num_stages=num_stages)
        strategy.set_world_ranks()
        strategy.check()
        assert strategy.num_processes == len(of_ranks)
        assert [device.index for device in strategy.stage_devices] == indices
        assert strategy.root_device.index == indices[0]
        assert strategy.distributed_sampler_kwargs == {"num_replicas": len(of_ranks), "rank": rank}


def test_nccl_is_tied_to_none_of_the_devices_and_waits_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once tied to one it refuses every other device of the process."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which the strategy is about to change
    calls: list[Any] = []
    monkeypatch.setattr(internals, "init_dist_connection", lambda *_, **names: calls.append([*names]))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "barrier", lambda device_ids: calls.append(device_ids))
    monkeypatch.setattr(lit_cifar.strategies.mp, "DistributedDataParallel", lambda model, **its: calls.append(its))
    strategy = strategy_of(4, rank=1)
    strategy.barrier()
    strategy.setup_distributed()
    strategy._setup_model(torch.nn.Linear(2, 2))
    monkeypatch.undo()
    assert calls == [[2], ["timeout"], {}]


def test_torchrun_with_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started_by_torchrun(monkeypatch, processes=4)
    with pytest.raises(ConfigError, match="4 processes were started"):
        L.Trainer(strategy="ddp_mp", devices=4, accelerator="cpu", **SILENT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert L.Trainer(strategy="ddp_mp", devices=4, accelerator="cpu", **SILENT).strategy.num_processes == 2
