"""`pp` and `ddp_pp` below the command line: schedules as tables, then two real processes against one device."""

import os
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from short_fits import fit, short
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.nn import functional as F
from torchmetrics import Metric

from analysis.stage_timeline import bubble_formula, bubbles, read_timeline, replay
from lit_cifar.data.batch_split import BatchSplit, GhostBatches
from lit_cifar.models import build_resnet
from lit_cifar.models.ghost_batchnorm import normalise_apart
from lit_cifar.models.partition import Partition
from lit_cifar.strategies import PipelineStrategy, mesh
from lit_cifar.strategies.mesh import make_mesh
from lit_cifar.strategies.pipeline import Pipeline, PrecomputedGradients, Schedule, ScheduleName
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.bench.timeline import Recorder, write_trace

IMAGE = (3, 32, 32)

SCHEDULES: list[ScheduleName] = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
MICROBATCHES = 4
TRAINED = [16, 10]  # samples of the training steps: a full batch, and one of which microbatches get 3, 3, 2 and 2
EVALUATED = [7, 2, 0]
TIMEOUT = timedelta(seconds=77)


@pytest.mark.parametrize(
    ("name", "num_processes", "owners"),
    [
        ("GPipe", 3, [0, 1, 2]),
        ("1F1B", 1, [0]),
        ("Interleaved1F1B", 3, [0, 1, 2, 0, 1, 2]),
        ("ZBVZeroBubble", 3, [0, 1, 2, 2, 1, 0]),
    ],
)
def test_owners(name: ScheduleName, num_processes: int, owners: list[int]) -> None:
    schedule = Schedule(name=name, num_processes=num_processes)
    assert [schedule.owner(stage) for stage in range(schedule.num_stages)] == owners


def trainer(devices: int, strategy: PipelineStrategy | str, **settings: object) -> L.Trainer:
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    return L.Trainer(**quiet, devices=devices, strategy=strategy, **settings)


@pytest.mark.parametrize(
    ("devices", "strategy", "batch_split"),
    [
        (2, "pp", BatchSplit(num_microbatches=4)),
        (5, "pp", BatchSplit(num_microbatches=5)),
        (3, PipelineStrategy(schedule="ZBVZeroBubble"), BatchSplit(num_microbatches=5)),
        (5, PipelineStrategy(num_microbatches=6), BatchSplit(num_microbatches=6)),
        (4, "ddp_pp", BatchSplit(dp_size=2, num_microbatches=4)),
        (4, PipelineStrategy(num_stages=4, schedule="ZBVZeroBubble"), BatchSplit(dp_size=2, num_microbatches=4)),
        (3, PipelineStrategy(num_stages=1, num_microbatches=1), BatchSplit(dp_size=3)),
    ],
)
def test_processes_of_a_pipeline_read_the_same_part(
    devices: int, strategy: PipelineStrategy | str, batch_split: BatchSplit
) -> None:
    made = trainer(devices, strategy).strategy
    assert BatchSplit.of(made) == batch_split
    assert isinstance(made, PipelineStrategy)
    assert made.strategy_name == ("pp" if batch_split.dp_size == 1 else "ddp_pp")


def test_a_handed_over_gradient_scales_and_accumulates() -> None:
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    used.grad = torch.tensor([10.0, 20.0])
    # Of a loss that was multiplied by 4 in the pipeline, as a gradient scaler then does.
    loss = PrecomputedGradients.apply(torch.tensor(3.0), [torch.tensor([1.0, 2.0]), None], 4.0, used, unused)
    assert loss.item() == 3.0
    (4.0 * loss / 2).backward()
    assert used.grad.tolist() == [10.5, 21.0]
    assert unused.grad is None


class WatchesGroups(L.Callback):
    """Notes over which processes the metrics count while a run validates."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.data_group = trainer.strategy.data_group
        self.groups = {metric.process_group for metric in pl_module.modules() if isinstance(metric, Metric)}


@short
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_of_one_process_fits_as_one_device_does(name: ScheduleName, tmp_path: Path) -> None:
    watch, modules = WatchesGroups(), []
    strategies = {"auto": GhostBatches(num_microbatches=2), PipelineStrategy(schedule=name, num_microbatches=2): None}
    for strategy, chunks in strategies.items():
        L.seed_everything(0, verbose=False)
        modules.append(LitResNet("resnet10", stem="imagenet", ghost_batchnorm=chunks))
        callbacks = [watch] if chunks is None else []
        fit(modules[-1], tmp_path, strategy=strategy, callbacks=callbacks, precision="64-true")
    theirs, ours = modules
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-9)
    # Not over all processes: those of one replica have counted the same samples. Afterwards they are plain again.
    assert watch.groups == {watch.data_group}
    assert {metric.process_group for metric in ours.modules() if isinstance(metric, Metric)} == {None}


def network_of() -> nn.Module:
    torch.manual_seed(0)
    return build_resnet("resnet10", stem="imagenet").double()


def batch_of(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    images = torch.randn(num_samples, 3, 32, 32, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 10, (num_samples,), generator=generator)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def run_schedules(rank: int, folder: str) -> None:
    """One of two processes: every schedule trains and evaluates; the process writes what it holds and has seen."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    results: dict[str, Any] = {name: run_schedule(name, rank) for name in SCHEDULES}
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)  # as Lightning does where processes share a GPU
    meshes = {size: make_mesh("cpu", model_size=size, timeout=TIMEOUT) for size in (1, 2)}
    results["groups"] = {
        (size, axis): describe(made.get_group(axis)) for size, made in meshes.items() for axis in ("data", "model")
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def describe(group: dist.ProcessGroup) -> tuple[list[int], timedelta]:
    """Its processes, and how long one waits for the others."""
    return dist.get_process_group_ranks(group), group._get_backend(torch.device("cpu")).options._timeout


def run_schedule(name: ScheduleName, rank: int) -> dict[str, object]:
    network, schedule = network_of(), Schedule(name=name, num_processes=2)
    partition = Partition.of(network, IMAGE, num_stages=schedule.num_stages)
    group = dist.group.WORLD
    assert group is not None
    recorder = Recorder()
    recorder.begin(0, network)
    pipeline = Pipeline(
        network,
        partition,
        schedule=schedule,
        num_microbatches=MICROBATCHES,
        loss=loss_of,
        group=group,
        device=torch.device("cpu"),
        recorder=recorder,
    )
    logits, spans = [], []
    for num_samples in TRAINED:
        sizes = [len(piece) for piece in torch.arange(num_samples).tensor_split(MICROBATCHES)]
        scales = [1 / num_samples] * MICROBATCHES
        logits.append(pipeline.train(*batch_of(num_samples), sizes=sizes, scales=scales))
        spans.append(recorder.spans())
    recorder.step = None
    network.eval()
    with torch.no_grad():
        logits += [pipeline.evaluate(batch_of(n)[0]) for n in EVALUATED]
    held = {buffer for stage in pipeline.stages.values() for buffer in stage.buffers()}
    return {
        "logits": logits,
        "spans": spans[0],
        "gradients": {key: p.grad for key, p in network.named_parameters() if p.grad is not None},
        "buffers": {key: buffer for key, buffer in network.named_buffers() if buffer in held},
        "optimizer": saved_after_a_step(network, pipeline),
    }


def saved_after_a_step(network: nn.Module, pipeline: Pipeline) -> list[dict[str, Any]]:
    """What the strategy puts into a checkpoint, and what it does again once another optimizer has loaded that."""
    strategy = PipelineStrategy()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.pipeline, strategy.mesh = pipeline, make_mesh("cpu", model_size=2, timeout=TIMEOUT)
    optimizer, resumed = (torch.optim.Adagrad(network.parameters()) for _ in range(2))
    optimizer.step()
    saved = strategy.optimizer_state(optimizer)
    strategy.optimizers = [resumed]
    strategy.load_optimizer_state_dict({"optimizer_states": [deepcopy(saved)]})
    return [saved, strategy.optimizer_state(resumed)]


@pytest.fixture(scope="module")
def by_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, object]]]:
    """What the two processes found, by schedule. One start of processes serves all tests."""
    folder = tmp_path_factory.mktemp("pipeline")
    mp.start_processes(run_schedules, args=(str(folder),), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone() -> tuple[nn.Module, list[Tensor]]:
    """The same steps on one device that normalises each microbatch by itself."""
    torch.manual_seed(0)
    network = normalise_apart(
        build_resnet("resnet10", stem="imagenet"), GhostBatches(num_microbatches=MICROBATCHES)
    ).double()
    logits = []
    for num_samples in TRAINED:
        images, labels = batch_of(num_samples)
        output = network(images)
        loss_of(output, labels).mean().backward()
        logits.append(output.detach())
    network.eval()
    with torch.no_grad():
        logits += [network(batch_of(n)[0]) for n in EVALUATED]
    return network, logits


@pytest.mark.parametrize("name", SCHEDULES)
def test_logits_gradients_and_running_statistics_are_those_of_one_device(
    name: str, by_processes: list, alone: tuple
) -> None:
    network, logits = alone
    first, second = (process[name] for process in by_processes)
    assert not first["gradients"].keys() & second["gradients"].keys()  # each trains its own stages alone
    for process in (first, second):
        torch.testing.assert_close(process["logits"], logits, rtol=0, atol=1e-9)
    expected = {key: p.grad for key, p in network.named_parameters()}
    torch.testing.assert_close(first["gradients"] | second["gradients"], expected, rtol=1e-9, atol=1e-9)
    buffers = dict(network.named_buffers())
    torch.testing.assert_close(first["buffers"] | second["buffers"], buffers, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_recorded_order_has_the_bubble_of_its_formula(
    name: ScheduleName, by_processes: list, tmp_path: Path
) -> None:
    write_trace([span for process in by_processes for span in process[name]["spans"]], tmp_path / "timeline.json")
    again = replay(read_timeline(tmp_path))
    works = again.groupby(["kind", "stage"]).size()
    assert set(works) == {MICROBATCHES} or name == "ZBVZeroBubble"
    assert works["forward"].tolist() == [MICROBATCHES] * Schedule(name=name, num_processes=2).num_stages
    expected = bubble_formula(name, num_workers=2, num_microbatches=MICROBATCHES)
    assert bubbles(again)["bubble"].item() == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_optimizer_state_is_saved_and_loaded_as_on_one_device(name: str, by_processes: list, alone: tuple) -> None:
    """Adagrad has a state for every parameter from the beginning, of other stages' parameters too."""
    network = deepcopy(alone[0])
    for parameter, own in zip(network.parameters(), alone[0].parameters(), strict=True):
        parameter.grad = own.grad
    optimizer = torch.optim.Adagrad(network.parameters())
    optimizer.step()
    expected = optimizer.state_dict()
    for process in by_processes:
        for state in process[name]["optimizer"]:
            assert list(state["state"]) == list(expected["state"])
            assert state["param_groups"] == expected["param_groups"]
            torch.testing.assert_close(state["state"], expected["state"], rtol=1e-9, atol=1e-9)


def test_the_groups_of_both_axes_have_the_time_limit_of_the_run(by_processes: list) -> None:
    for rank, process in enumerate(by_processes):
        alone, all_ranks = ([rank], TIMEOUT), ([0, 1], TIMEOUT)
        expected = {(1, "data"): all_ranks, (1, "model"): alone, (2, "data"): alone, (2, "model"): all_ranks}
        assert process["groups"] == expected


def test_a_strategy_hands_its_time_limit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    monkeypatch.setattr(mesh, "make_mesh", made)
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: None)
    strategy = trainer(2, PipelineStrategy(timeout=TIMEOUT)).strategy
    strategy.setup_environment()
    made.assert_called_once_with("cpu", model_size=2, timeout=TIMEOUT)
