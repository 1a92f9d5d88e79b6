"""The promise of this project: the number of processes does not change the model that comes out.

In float64 at a real learning rate. In float32 any change of the summation order (1e-7) moves some activation across a
kink of ReLU or max-pooling within a few steps, and its gradient then differs by far more than 1e-7: the same run from
weights that differ by 1e-7 differs by a twentieth of all that it learned after 12 steps. So the float32 case takes
small steps: enough for a wrong gradient to stand out five times over the tolerance, and too small for kinks to matter.
"""

from pathlib import Path

import lightning as L
import pytest
from commands import TINY, launch
from recorder import global_steps
from torch import Tensor

from lit_cifar import LitResNet
from lit_cifar.checkpoint.format import read_checkpoint

# 303 images in batches of 32 are nine full steps and a ragged one of 15, which no number of processes divides: 20 steps
# in two epochs.
SETTINGS = [
    *TINY,
    "--data.num_train=319",
    "--data.batch_size=32",
    "--trainer.max_epochs=2",
    "--trainer.strategy=ddp",
    "--trainer.sync_batchnorm=true",
    "--trainer.limit_val_batches=0",
]


def train(folder: Path, num_processes: int, *more: str) -> tuple[dict[str, Tensor], list[object]]:
    """Final parameters and buffers, and the ids of every global step."""
    ids = folder / f"ids{num_processes}"
    ids.mkdir()
    run = folder / f"run{num_processes}"
    launch(
        "fit",
        *SETTINGS,
        f"--trainer.devices={num_processes}",
        f"--run_dir={run}",
        "--trainer.callbacks+=recorder.RecordIds",
        f"--trainer.callbacks.folder={ids}",
        *more,
        ranks=num_processes,
    )
    return read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"], list(global_steps(ids))


def untrained_weight() -> Tensor:
    """The first layer that every one of these runs starts from."""
    L.seed_everything(0)
    return LitResNet("resnet10", stem="imagenet").network.conv1.weight.detach()


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor], *, buffers: bool) -> float:
    """Over the running statistics relative to their size, or over the parameters."""
    assert a.keys() == b.keys()
    gaps = [
        float(((a[name].double() - b[name].double()).abs() / b[name].double().abs().clamp(min=1)).max())
        for name in a
        if ("running" in name or "num_batches" in name) == buffers
    ]
    return max(gaps)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("precision", "lr", "tolerance"),
    [
        pytest.param("64-true", 0.02, 1e-9, marks=pytest.mark.slow),
        pytest.param("32-true", 1e-5, 1e-5, marks=pytest.mark.exhaustive),
    ],
)
def test_ddp_trains_the_same_model_with_1_2_and_4_processes(
    tmp_path: Path, precision: str, lr: float, tolerance: float
) -> None:
    flags = [f"--trainer.precision={precision}", f"--model.optimizer.lr={lr}"]
    alone, steps_alone = train(tmp_path, 1, *flags)
    assert [len(ids) for _, _, ids in steps_alone] == ([32] * 9 + [15]) * 2
    for num_processes in (2, 4):
        together, steps = train(tmp_path, num_processes, *flags)
        assert steps == steps_alone
        assert largest_difference(together, alone, buffers=False) <= tolerance
        # Activations in the deep layers magnify what the weights differ by.
        assert largest_difference(together, alone, buffers=True) <= 100 * tolerance
    assert (alone["conv1.weight"] - untrained_weight()).abs().max() > 5 * tolerance
