"""What any mode wrote in the middle of an epoch, any mode resumes: weights, running statistics, optimizer, counts.

Every mode is stopped in the second of two epochs. Every mode then resumes each of the checkpoints, and must end where
one device ends that resumes the same checkpoint and normalises as the mode does; and where one device ends that was
never stopped, if both modes normalise alike. In float64, so that the bound is sharp.

The checkpoint of each mode is a test by itself, so that a part of them can be run: `pytest -m exhaustive --part=1/11`.
That each mode resumes its own checkpoint, and that one device can load it, is also in `test_verify.py`; equal bits are
in `test_exact_resume.py`.
"""

from pathlib import Path

import pytest
from commands import launch, run_here
from comparing import assert_same_checkpoint
from short_fits import losses

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.launch.signals import EXIT_STOPPED

SETTINGS = [
    "fit",
    "--model.arch=resnet10",
    "--model.stem=imagenet",
    "--model.lr_scheduler=torch.optim.lr_scheduler.StepLR",
    "--model.lr_scheduler.step_size=1",
    "--model.optimizer.lr=0.02",
    "--data.dataset=synthetic",
    "--data.num_train=112",
    "--data.val_size=16",
    "--data.batch_size=32",
    "--trainer.precision=64-true",
    "--trainer.gradient_clip_val=0.5",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=0",
    "--trainer.log_every_n_steps=1",
    "--trainer.max_epochs=2",
    "--last_checkpoint.every_n_steps=1",
    "--trainer.enable_progress_bar=false",
]
SHARDS, MICROBATCHES = "--model.ghost_batchnorm.dp_size=2", "--model.ghost_batchnorm.num_microbatches=2"
PIPELINE = ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.num_microbatches=2"]
# Flags of a mode, processes it needs (0: it runs in this one, 1: it starts its own), and flags of what it equals.
MODES: dict[str, tuple[list[str], int, list[str]]] = {
    "single": (["--trainer.devices=1"], 0, []),
    "dp": (["--trainer.strategy=dp", "--trainer.devices=2"], 0, ["--model.ghost_batchnorm.replicas_per_rank=2"]),
    "mp": (["--trainer.strategy=mp", "--trainer.devices=2"], 0, []),
    "ddp": (["--trainer.strategy=ddp", "--trainer.devices=2"], 2, [SHARDS]),
    "ddp_spawn": (["--trainer.strategy=ddp_spawn", "--trainer.devices=2"], 1, [SHARDS]),
    "ddp_mp": (["--trainer.strategy=ddp_mp", "--trainer.devices=4"], 2, [SHARDS]),
    "pp": ([*PIPELINE, "--trainer.devices=2"], 2, [MICROBATCHES]),
    "ddp_pp": ([*PIPELINE, "--trainer.strategy.num_stages=2", "--trainer.devices=4"], 4, [SHARDS, MICROBATCHES]),
    "fsdp2": (["--trainer.strategy=fsdp2", "--trainer.devices=2"], 2, [SHARDS]),
    "tp": (["--trainer.strategy=tp", "--trainer.devices=2"], 2, []),
}


def run(folder: Path, name: str, flags: list[str], *, num_processes: int = 0, status: int = 0) -> None:
    """In so many processes; in this one for 0."""
    command = [*SETTINGS, *flags, f"--run_dir={folder / name}"]
    result = launch(*command, ranks=num_processes, check=False) if num_processes else run_here(*command)
    assert result.status == status, result.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("writer", MODES)
def test_what_one_mode_wrote_every_mode_resumes(writer: str, tmp_path: Path) -> None:
    flags, num_processes, equals = MODES[writer]
    stop = ["--trainer.callbacks+=stopping.SignalAfter", "--trainer.callbacks.step=4"]
    run(tmp_path, "written", [*flags, *stop], num_processes=num_processes, status=EXIT_STOPPED)
    resume = f"--ckpt_path={tmp_path / 'written' / 'checkpoints' / 'last.ckpt'}"
    run(tmp_path, "undisturbed", equals)
    for reader, (flags, num_processes, _) in MODES.items():
        run(tmp_path, reader, [*flags, resume], num_processes=num_processes)
    for chunks in sorted({tuple(equals) for _, _, equals in MODES.values()}):
        run(tmp_path, "-".join(["alone", *chunks]), [*chunks, resume])
    for reader, (*_, chunks) in MODES.items():
        assert_same_end(tmp_path / reader, tmp_path / "-".join(["alone", *chunks]))
        if chunks == equals:
            assert_same_end(tmp_path / reader, tmp_path / "undisturbed")


def assert_same_end(run: Path, other: Path) -> None:
    found, wanted = (read_checkpoint(each / "checkpoints" / "last.ckpt") for each in (run, other))
    assert found["global_step"] == wanted["global_step"] == 6, run
    assert found["position"] | {"rows": 0} == wanted["position"] | {"rows": 0}, run
    assert found["lr_schedulers"] == wanted["lr_schedulers"], run
    assert list(found["state_dict"]) == list(wanted["state_dict"]), run
    assert_same_checkpoint(found, wanted, tolerance=1e-9)
    # Of the second epoch, which the run has in part from the one before it; logged in float32.
    assert losses(run)[-1] == pytest.approx(losses(other)[-1], rel=1e-6), run
