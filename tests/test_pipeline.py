"""`pp` and `ddp_pp`: the groups of a process, then schedules that `test_parity` does not have, against one device."""

from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same_checkpoint
from commands import TINY, callback, counts, last_checkpoint, launch, losses, mode_flags, run_here
from lightning.pytorch.strategies import DDPStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from analysis.stage_timeline import bubble_formula, bubbles, read_timeline, replay
from lit_cifar.strategies import PipelineStrategy
from lit_cifar.tools.modes import SILENT

TIMEOUT = timedelta(seconds=77)


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


# A full batch, and one of which microbatches get 3, 3, 2 and 2; evaluated in batches of 7, 7 and 2. Adagrad has a state
# of every parameter from the beginning, of other stages' parameters too.
FLAGS = [*TINY, "--data.num_train=42", "--data.eval_batch_size=7", "--trainer.precision=64-true"]
FLAGS += ["--model.optimizer=Adagrad", "--model.optimizer.lr=0.001", "--trainer.max_epochs=2"]
RECORD = callback("analysis.timeline.Timeline", first_step=1, num_steps=2)


class SharesGPU(PipelineStrategy):
    """Has a process group that is tied to a GPU, as Lightning makes it where processes share one."""

    def setup_distributed(self) -> None:
        super().setup_distributed()
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)


def test_two_processes_train_as_one_in_the_schedules_order(tmp_path: Path) -> None:
    """With process groups as where processes share a GPU; one device normalises each microbatch by itself."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    run_here("fit", *FLAGS, "--model.ghost_batchnorm.num_microbatches=4", f"--run_dir={alone}")
    schedule = mode_flags("test_pipeline.SharesGPU", schedule="Interleaved1F1B")
    launch("fit", *FLAGS, *schedule, *RECORD, f"--run_dir={run}", ranks=2)
    assert_same_checkpoint(last_checkpoint(run), last_checkpoint(alone), tolerance=1e-9)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6)  # logged in float32
    assert counts(run, "val")["all"] == counts(alone, "val")["all"]
    timeline = read_timeline(run)
    assert sorted(set(timeline["step"])) == [1, 2]
    assert timeline.loc[timeline["step"] == 2, "start_ms"].min() == 0
    again = replay(timeline[timeline["step"] == 2])
    works = again.groupby(["kind", "stage"]).size()
    assert works.tolist() == [4] * 8
    expected_bubble = bubble_formula("Interleaved1F1B", num_workers=2, num_microbatches=4)
    assert bubbles(again)["bubble"].item() == pytest.approx(expected_bubble)
