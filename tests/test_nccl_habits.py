"""Whole runs of every mode with processes, in which all that NCCL refuses is refused: see `nccl_double`."""

from pathlib import Path

import pytest
from commands import TINY, callback, graded, launch, mode_flags

from lit_cifar.launch.forked import EndedRun
from lit_cifar.launch.signals import EXIT_STOPPED

SIZES = ["--data.num_train=64", "--figures.every_n_epochs=1", "--last_checkpoint.every_n_steps=2"]
# Devices and processes; `ddp_spawn` starts them itself.
MODES = {"ddp": (2, 2), "ddp_mp": (4, 2), "pp": (2, 2), "fsdp2": (2, 2), "tp": (2, 2)}
LONGER = {"ddp_spawn": (2, 1), "ddp_pp": (4, 4)}


def run_double(mode: str, run: Path, *flags: str, command: str = "fit", status: int = 0) -> EndedRun:
    devices, ranks = (MODES | LONGER)[mode]
    words = [*TINY, *SIZES, *mode_flags(mode, devices), *callback("nccl_double.NCCLDouble"), *flags]
    result = launch(command, *words, f"--run_dir={run}", ranks=ranks, check=False)
    assert result.status == status, result.stderr[-4000:]
    return result


@pytest.mark.parametrize("mode", graded("ddp", "pp", "fsdp2", slow=["ddp_mp", "tp"], exhaustive=LONGER))
def test_a_whole_fit_does_nothing_that_nccl_refuses(mode: str, tmp_path: Path) -> None:
    """With validation, figures, checkpoints and accounts; every habit that it must not have was planted, and caught."""
    run_double(mode, tmp_path, *callback("nccl_double.Misbehaves"))
    seen = [int((tmp_path / f"collectives{rank}").read_text()) for rank in range(2)]
    assert min(seen) > 20, f"collectives that were looked at: {seen}"


@pytest.mark.parametrize("mode", graded(slow=MODES, exhaustive=LONGER))
def test_neither_does_one_that_is_stopped_and_goes_on_nor_a_test(mode: str, tmp_path: Path) -> None:
    run = tmp_path / "fit"
    run_double(mode, run, *callback("stopping.SignalAfter", step=2, rank=1), status=EXIT_STOPPED)
    run_double(mode, run, "--resume=auto", "--trainer.gradient_clip_val=1.0")
    assert (run / "collectives1").exists()
    run_double(mode, tmp_path / "test", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", command="test")
