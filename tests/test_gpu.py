"""The command line on one GPU; everything here skips, saying so, where there is none."""

from pathlib import Path

import pytest
import torch
from commands import TINY, counts, launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = [flag for flag in TINY if "accelerator" not in flag] + ["--trainer.accelerator=cuda", "--trainer.devices=1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written on the GPU, its images resident there."""
    run = tmp_path_factory.mktemp("gpu") / "run"
    launch("fit", *CUDA, "--data.resident=device", f"--run_dir={run}")
    return run / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("resident", ["host", "device"])
@pytest.mark.parametrize("strategy", ["auto", "dp", "ddp", "ddp_spawn"])
def test_every_mode_trains_and_counts_as_the_first(
    checkpoint: Path, tmp_path: Path, strategy: str, resident: str
) -> None:
    flags = [*CUDA, f"--trainer.strategy={strategy}", f"--data.resident={resident}"]
    launch("fit", *flags, f"--run_dir={tmp_path / 'fit'}")
    launch("test", *flags, f"--ckpt_path={checkpoint}", f"--run_dir={tmp_path / 'test'}")
    launch("test", *CUDA, f"--ckpt_path={checkpoint}", f"--run_dir={tmp_path / 'alone'}")
    assert counts(tmp_path / "test")["all"] == counts(tmp_path / "alone")["all"]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "64-true"])
def test_every_precision_trains(tmp_path: Path, precision: str) -> None:
    launch("fit", *CUDA, f"--trainer.precision={precision}", f"--run_dir={tmp_path / 'run'}")
