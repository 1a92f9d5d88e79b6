"""The command line on one GPU, in every mode that needs no second one; all skips, saying so, where there is none."""

from pathlib import Path

import pytest
import torch
from commands import TINY, counts, launch

from lit_cifar.commands.verify import verify
from lit_cifar.commands.verify.compare import EXACT_BOUND

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = [flag for flag in TINY if "accelerator" not in flag] + ["--trainer.accelerator=cuda", "--trainer.devices=1"]


MODES = {
    **{name: [f"strategy={name}"] for name in ("auto", "dp", "ddp", "ddp_spawn", "pp", "fsdp2", "tp")},
    "mp": ["strategy=LayerParallelStrategy", "strategy.num_stages=2"],
    "mp with microbatches": [
        *("strategy=LayerParallelStrategy", "strategy.num_stages=2"),
        "strategy.num_microbatches=2",
    ],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written on the GPU, its images resident there."""
    run = tmp_path_factory.mktemp("gpu") / "run"
    launch("fit", *CUDA, "--data.resident=device", f"--run_dir={run}")
    return run / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("resident", ["host", "device"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_counts_as_the_first(checkpoint: Path, tmp_path: Path, mode: str, resident: str) -> None:
    flags = [*CUDA, *(f"--trainer.{flag}" for flag in MODES[mode]), f"--data.resident={resident}"]
    launch("fit", *flags, f"--run_dir={tmp_path / 'fit'}")
    launch("test", *flags, f"--ckpt_path={checkpoint}", f"--run_dir={tmp_path / 'test'}")
    launch("test", *CUDA, f"--ckpt_path={checkpoint}", f"--run_dir={tmp_path / 'alone'}")
    assert counts(tmp_path / "test")["all"] == counts(tmp_path / "alone")["all"]


@pytest.mark.timeout(300)
def test_a_run_on_the_gpu_follows_the_one_device() -> None:
    flags = [flag for flag in TINY if not flag.startswith(("--trainer.accelerator", "--trainer.max_epochs"))]
    (row,) = verify(["single"], args=[*flags, "--trainer.accelerator=cuda", "--trainer.precision=64-true"])
    assert row.problems == []
    assert max(row.differences.values()) <= EXACT_BOUND


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "64-true"])
def test_every_precision_trains(tmp_path: Path, precision: str) -> None:
    launch("fit", *CUDA, f"--trainer.precision={precision}", f"--run_dir={tmp_path / 'run'}")
