"""`pp` and `ddp_pp`: sizes as tables, then schedules that `test_parity` does not have, against one device."""

from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same_checkpoint
from commands import TINY, callback, counts, last_checkpoint, launch, mode_flags, run_here
from lightning.pytorch.strategies import DDPStrategy
from short_fits import fit, losses, short
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchmetrics import Metric

from analysis.stage_timeline import bubble_formula, bubbles, read_timeline, replay
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.mode import Layout, mode_of
from lit_cifar.strategies import PipelineStrategy
from lit_cifar.strategies.pipeline import ScheduleName
from lit_cifar.strategies.pp import Schedule
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.modes import SILENT

TIMEOUT = timedelta(seconds=77)


@pytest.mark.parametrize(
    ("name", "owners"),
    [("GPipe", [0, 1, 2]), ("Interleaved1F1B", [0, 1, 2, 0, 1, 2]), ("ZBVZeroBubble", [0, 1, 2, 2, 1, 0])],
)
def test_owners(name: ScheduleName, owners: list[int]) -> None:
    assert Schedule(name=name, num_processes=3).owners == owners


@pytest.mark.parametrize(
    ("devices", "strategy", "layout"),
    [
        (2, "pp", Layout(model_parallel_size=2, num_microbatches=4)),
        (5, "pp", Layout(model_parallel_size=5, num_microbatches=5)),
        (3, PipelineStrategy(schedule="ZBVZeroBubble"), Layout(model_parallel_size=3, num_microbatches=5)),
        (4, "ddp_pp", Layout(data_parallel_size=2, model_parallel_size=2, num_microbatches=4)),
        (
            4,
            PipelineStrategy(num_stages=4, schedule="ZBVZeroBubble"),
            Layout(data_parallel_size=2, model_parallel_size=2, num_microbatches=4),
        ),
        (3, PipelineStrategy(num_stages=1, num_microbatches=1), Layout(data_parallel_size=3)),
    ],
)
def test_a_pipeline_reads_one_part(devices: int, strategy: PipelineStrategy | str, layout: Layout) -> None:
    made = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **SILENT).strategy
    assert mode_of(made).layout == layout
    assert isinstance(made, PipelineStrategy)
    assert made.strategy_name == ("pp" if layout.data_parallel_size == 1 else "ddp_pp")


@pytest.mark.usefixtures("one_process")
def test_a_process_makes_its_own_two_groups_alone_with_the_runs_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of 1,024 processes would take each of them more than 1,024 calls, and NCCL as many splits of all."""
    make = Mock(wraps=dist.new_group)
    monkeypatch.setattr(dist, "new_group", make)
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: None)
    dist.init_process_group("fake", rank=5, world_size=1024, store=FakeStore())
    strategy = PipelineStrategy(num_stages=4, timeout=TIMEOUT)
    L.Trainer(accelerator="cpu", devices=1024, strategy=strategy, **SILENT)
    strategy.setup_environment()
    assert [made.kwargs["timeout"] for made in make.call_args_list] == [TIMEOUT] * 2
    groups = (strategy.data_group, strategy.model_group)
    assert [dist.get_process_group_ranks(group) for group in groups] == [[*range(1, 1024, 4)], [4, 5, 6, 7]]


class WatchesGroups(L.Callback):
    """Notes over which processes the metrics count while a run validates."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.data_group = trainer.strategy.data_group
        self.groups = {metric.process_group for metric in pl_module.modules() if isinstance(metric, Metric)}


@short
@pytest.mark.usefixtures("one_process")
def test_a_pipeline_of_one_process_fits_as_one_device_does(tmp_path: Path) -> None:
    watch, modules = WatchesGroups(), []
    of_pipeline = PipelineStrategy(num_microbatches=2)
    for strategy, chunks in {"auto": GhostBatches(num_microbatches=2), of_pipeline: None}.items():
        L.seed_everything(0, verbose=False)
        modules.append(LitResNet("tiny", stem="imagenet", ghost_batchnorm=chunks))
        callbacks = [watch] if chunks is None else []
        fit(modules[-1], tmp_path, strategy=strategy, callbacks=callbacks, precision="64-true")
    theirs, ours = modules
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-9)
    # Not over all processes: those of one replica have counted the same samples. Afterwards they are plain again.
    assert watch.groups == {watch.data_group}
    assert {metric.process_group for metric in ours.modules() if isinstance(metric, Metric)} == {None}


# A full batch, and one of which microbatches get 3, 3, 2 and 2; evaluated in batches of 7, 7 and 2. Adagrad has a state
# of every parameter from the beginning, of other stages' parameters too.
FLAGS = [*TINY, "--data.num_train=42", "--data.eval_batch_size=7", "--trainer.precision=64-true"]
FLAGS += ["--model.optimizer=Adagrad", "--model.optimizer.lr=0.001", "--trainer.max_epochs=2"]
RECORD = callback("analysis.timeline.Timeline", first_step=1, num_steps=2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one device that normalises each microbatch by itself."""
    run = tmp_path_factory.mktemp("alone") / "run"
    run_here("fit", *FLAGS, "--model.ghost_batchnorm.num_microbatches=4", f"--run_dir={run}")
    return run


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_two_processes_train_as_one_in_the_schedules_order(name: ScheduleName, alone: Path, tmp_path: Path) -> None:
    """With process groups as where processes share a GPU."""
    run = tmp_path / "run"
    schedule = mode_flags("option_backends.SharesGPU", schedule=name)
    launch("fit", *FLAGS, *schedule, *RECORD, f"--run_dir={run}", ranks=2)
    assert_same_checkpoint(last_checkpoint(run), last_checkpoint(alone), tolerance=1e-9)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6)  # logged in float32
    assert counts(run, "val")["all"] == counts(alone, "val")["all"]
    timeline = read_timeline(run)
    assert sorted(set(timeline["step"])) == [1, 2]
    assert timeline.loc[timeline["step"] == 2, "start_ms"].min() == 0
    again = replay(timeline[timeline["step"] == 2])
    works = again.groupby(["kind", "stage"]).size()
    assert set(works) == {4} or name == "ZBVZeroBubble"
    assert works["forward"].tolist() == [4] * 4
    expected_bubble = bubble_formula(name, num_workers=2, num_microbatches=4)
    assert bubbles(again)["bubble"].item() == pytest.approx(expected_bubble)
