"""What any mode wrote, any mode resumes: weights, running statistics, optimizer, epoch.

Every mode trains for an epoch. Every mode then resumes each of the checkpoints for another epoch, and must end where
one device ends that resumes the same checkpoint and normalises as the mode does; in float64, so that the bound is
sharp.

The checkpoint of each mode is a test by itself, so that a part of them can be run: `pytest -m exhaustive --part=1/11`.
That each mode resumes its own checkpoint, and that one device can load it, is also in `test_verify.py`; the middle of
an epoch is in `test_exact_resume.py`.
"""

from pathlib import Path
from typing import Any

import pytest
from commands import launch, run_here
from comparing import assert_same_checkpoint

from lit_cifar.checkpoint.format import read_checkpoint

SETTINGS = [
    "fit",
    "--model.arch=resnet10",
    "--model.stem=imagenet",
    "--model.lr_scheduler=torch.optim.lr_scheduler.StepLR",
    "--model.lr_scheduler.step_size=1",
    "--model.optimizer.lr=0.02",
    "--data.dataset=synthetic",
    "--data.num_train=80",
    "--data.val_size=16",
    "--data.batch_size=32",
    "--trainer.precision=64-true",
    "--trainer.gradient_clip_val=0.5",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=0",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
]
SHARDS, MICROBATCHES = "--model.ghost_batchnorm.num_shards=2", "--model.ghost_batchnorm.num_microbatches=2"
PIPELINE = ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.num_microbatches=2"]
# Flags of a mode, processes it needs (0: it runs in this one, 1: it starts its own), and flags of what it equals.
MODES: dict[str, tuple[list[str], int, list[str]]] = {
    "single": (["--trainer.devices=1"], 0, []),
    "dp": (["--trainer.strategy=dp", "--trainer.devices=2"], 0, ["--model.ghost_batchnorm.replicas_per_shard=2"]),
    "mp": (["--trainer.strategy=mp", "--trainer.devices=2"], 0, []),
    "ddp": (["--trainer.strategy=ddp", "--trainer.devices=2"], 2, [SHARDS]),
    "ddp_spawn": (["--trainer.strategy=ddp_spawn", "--trainer.devices=2"], 1, [SHARDS]),
    "ddp_mp": (["--trainer.strategy=ddp_mp", "--trainer.devices=4"], 2, [SHARDS]),
    "pp": ([*PIPELINE, "--trainer.devices=2"], 2, [MICROBATCHES]),
    "ddp_pp": ([*PIPELINE, "--trainer.strategy.num_stages=2", "--trainer.devices=4"], 4, [SHARDS, MICROBATCHES]),
    "fsdp2": (["--trainer.strategy=fsdp2", "--trainer.devices=2"], 2, [SHARDS]),
    "tp": (["--trainer.strategy=tp", "--trainer.devices=2"], 2, []),
}


def run(command: list[str], *, num_processes: int = 0) -> None:
    """In so many processes; in this one for 0."""
    result = launch(*command, ranks=num_processes) if num_processes else run_here(*command)
    assert result.status == 0, result.stderr


def checkpoint(folder: Path, *names: str) -> Path:
    return folder / "-".join(names) / "checkpoints" / "last.ckpt"


def command(folder: Path, flags: list[str], *names: str) -> list[str]:
    """Train the first epoch (one name), or resume the checkpoint of the first name for the second."""
    more = ["--trainer.max_epochs=1"]
    if len(names) > 1:
        more = ["--trainer.max_epochs=2", f"--ckpt_path={checkpoint(folder, names[0])}"]
    return [*SETTINGS, *flags, *more, f"--run_dir={folder / '-'.join(names)}"]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("writer", MODES)
def test_what_one_mode_wrote_every_mode_resumes(writer: str, tmp_path: Path) -> None:
    """Every reader ends where one device ends that resumed the same checkpoint."""
    run(command(tmp_path, MODES[writer][0], writer), num_processes=MODES[writer][1])
    for reader, (flags, num_processes, _) in MODES.items():
        run(command(tmp_path, flags, writer, reader), num_processes=num_processes)
    for equals in sorted({tuple(equals) for _, _, equals in MODES.values()}):
        run(command(tmp_path, [*equals], writer, "alone", *equals))
    for reader in MODES:
        found = read_checkpoint(checkpoint(tmp_path, writer, reader))
        wanted = read_checkpoint(checkpoint(tmp_path, writer, "alone", *MODES[reader][2]))
        assert_same_end(found, wanted, where=f"{reader} after {writer}")


def assert_same_end(found: dict[str, Any], wanted: dict[str, Any], *, where: str) -> None:
    assert found["global_step"] == wanted["global_step"] == 4, where
    assert found["lr_schedulers"] == wanted["lr_schedulers"], where
    assert list(found["state_dict"]) == list(wanted["state_dict"]), where
    assert_same_checkpoint(found, wanted, tolerance=1e-9)
