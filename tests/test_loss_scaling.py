"""`16-mixed`: all processes find the same scale, and leave out the same steps."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from commands import TINY, launch, mode_flags
from lightning.pytorch.plugins import MixedPrecision
from short_fits import fit, losses, short
from torch import Tensor, nn

from lit_cifar import LitResNet
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.cli.preflight import check_clipping
from lit_cifar.errors import ConfigError
from lit_cifar.strategies import PipelineStrategy
from lit_cifar.strategies.mesh import agree_on_overflow, loss_scale
from lit_cifar.strategies.pipeline import Pipeline


def scaled(init_scale: float = 1024.0) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))


@pytest.mark.parametrize(("fused", "clip", "refused"), [(True, 1.0, True), (True, None, False), (False, 1.0, False)])
def test_what_a_fused_kernel_scales_back_is_not_clipped(fused: bool, clip: float | None, refused: bool) -> None:
    trainer = L.Trainer(accelerator="cpu", plugins=[scaled()], gradient_clip_val=clip, logger=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, fused=fused)
    with pytest.raises(ConfigError, match=r"clip_val=1\.0.*fused=true") if refused else nullcontext():
        check_clipping(trainer, optimizer)


@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
def test_a_step_is_left_out_where_another_process_has_overflowed(
    elsewhere: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: tensor.clamp_(min=elsewhere))
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    precision = scaled(4.0)
    agree_on_overflow(precision)
    scaler = precision.scaler
    assert scaler is not None
    assert float(loss_scale(precision, torch.device("cpu"))) == 4.0
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), weight[0].item()) == ((2.0, 1.0) if elsewhere else (4.0, 0.0))


@short
@pytest.mark.usefixtures("one_process")
def test_a_pipeline_scales_the_loss_of_its_own_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled only when the gradients are handed over, small ones would have been lost in float16."""
    scales, train = [], Pipeline.train

    def noting(self: Pipeline, images: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        scales.append(float(kwargs["scales"][0]) * len(images))
        return train(self, images, labels, **kwargs)

    monkeypatch.setattr(Pipeline, "train", noting)
    fit(LitResNet("tiny", stem="imagenet"), tmp_path, strategy=PipelineStrategy(), plugins=[scaled(64.0)], max_steps=1)
    assert scales == [64.0]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mode", "chunks"), [("pp", "num_microbatches=4"), ("fsdp2", "dp_size=2"), ("tp", "")])
def test_all_processes_leave_out_a_step_in_which_one_has_overflowed(mode: str, chunks: str, tmp_path: Path) -> None:
    """And otherwise train what one device trains in 16-mixed; on the CPU, where torch scales too, but Lightning not."""
    flags = [*TINY, "--model.optimizer.lr=0.01", "--trainer.plugins=lightning.pytorch.plugins.MixedPrecision"]
    flags += ["--trainer.plugins.precision=16-mixed", "--trainer.plugins.device=cpu"]
    flags += ["--trainer.callbacks+=option_backends.Overflow"]
    paths = {name: tmp_path / name for name in ("run", "alone")}
    of_mode = {"run": mode_flags(mode), "alone": [f"--model.ghost_batchnorm.{chunks}"] if chunks else []}
    for name, path in paths.items():
        arguments = [*flags, f"--trainer.callbacks.path={tmp_path / f'{name}_scale'}", *of_mode[name]]
        launch("fit", *arguments, f"--run_dir={path}", ranks=2 if name == "run" else 1)
    scales = [(tmp_path / name).read_text().split() for name in ("run_scale0", "run_scale1", "alone_scale0")]
    assert scales == [["1024.0", *["512.0"] * 4]] * 3
    found, expected = (read_checkpoint(path / "checkpoints" / "last.ckpt") for path in paths.values())
    assert found["MixedPrecision"] == expected["MixedPrecision"]
    assert all(tensor.isfinite().all() for tensor in found["state_dict"].values())
    assert losses(paths["run"]) == pytest.approx(losses(paths["alone"]), rel=0.02)
