"""The package on one GPU; where there is none all skips, saying so.

    pytest tests/test_gpu.py            what one process can show
    pytest -m slow tests/test_gpu.py    what starts processes: every mode that one GPU can run

`LIT_CIFAR_GPU_TESTS=cpu` runs these tests on the CPU, so that they keep working where there is no GPU.
"""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same_checkpoint
from commands import TINY, counts, last_checkpoint, launch, mode_flags, run_here
from torch import Tensor

from lit_cifar.data.augment import Augmentation
from lit_cifar.data.images import ImageSet
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.mixing import Mixing
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.mode import Layout
from lit_cifar.models import build_resnet
from lit_cifar.models.partition import Partition
from lit_cifar.strategies.mp import StagedForward
from lit_cifar.tools.verify.command import verify
from lit_cifar.tools.verify.record import EXACT_BOUND

ACCELERATOR = os.environ.get("LIT_CIFAR_GPU_TESTS", "cuda")
DEVICE = torch.device(ACCELERATOR, 0) if ACCELERATOR == "cuda" else torch.device(ACCELERATOR)

pytestmark = [
    pytest.mark.skipif(ACCELERATOR == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),  # the first run on a GPU loads its libraries
]

FLAGS = [*TINY, "--trainer.devices=1", f"--trainer.accelerator={ACCELERATOR}"]
PIXELS = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
IMAGES = ImageSet(PIXELS, torch.arange(40) % 10, tuple("abcdefghij"))


@pytest.mark.parametrize("layout", [Layout(), Layout(data_parallel_size=2, data_parallel_rank=1)])
@pytest.mark.parametrize("mixing", [None, Mixing(mixup=0.4, cutmix=1.0)])
def test_batches_made_on_the_device_are_those_of_the_host(layout: Layout, mixing: Any) -> None:
    """The same bytes, with the largest keys; mixed, one of two processes makes the images of the other's too."""
    sampler = TrainSampler(num_samples=40, batch_size=4, layout=layout, epoch=3)
    settings = {"augmentation": Augmentation(seed=2**61, cutout=8), "mixing": mixing}
    weights = torch.arange(1.0, 11.0)
    there = list(BatchLoader(IMAGES.to(DEVICE), sampler, **settings, class_weights=weights.to(DEVICE)))
    here = list(BatchLoader(IMAGES, sampler, **settings, class_weights=weights))
    assert len(there) == len(here) == 10
    for found, expected in zip(there, here, strict=True):
        assert found.weight == expected.weight
        for name in ("images", "labels", "ids"):
            assert getattr(found, name).device == DEVICE
            assert getattr(found, name).cpu().equal(getattr(expected, name))
        torch.testing.assert_close(found.soft_targets.cpu(), expected.soft_targets)


GHOST = "--model.ghost_batchnorm"
MICROBATCHED = mode_flags("LayerParallelStrategy", 1, num_stages=2, num_microbatches=2)
# The flags of a run here, and those of the run on the CPU that it equals.
RUNS = {
    "auto": ([], []),
    "two replicas": (mode_flags("DataParallelStrategy", 1, num_replicas=2), [f"{GHOST}.local_replicas=2"]),
    "two stages": (MICROBATCHED, [f"{GHOST}.num_microbatches=2"]),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_in_this_process_ends_where_that_of_one_cpu_does(tmp_path: Path, run: str) -> None:
    """With a ragged last batch. Counts too; the tensors of its checkpoint are the host's."""
    precise = ["--data.num_train=90", "--trainer.precision=64-true", "--model.optimizer.lr=0.01"]
    precise.append("--data.eval_batch_size=5")  # of 16: the last batch is one image
    found, expected = tmp_path / "found", tmp_path / "expected"
    there, here = RUNS[run]
    for folder, flags in {found: there, expected: [*here, "--trainer.accelerator=cpu"]}.items():
        run_here("fit", *FLAGS, *precise, *flags, f"--run_dir={folder}")
    checkpoint = last_checkpoint(found)
    states = checkpoint["optimizer_states"][0]["state"].values()
    tensors = [*checkpoint["state_dict"].values(), *(value for state in states for value in state.values())]
    assert {value.device.type for value in tensors if isinstance(value, Tensor)} == {"cpu"}
    assert_same_checkpoint(checkpoint, last_checkpoint(expected), tolerance=EXACT_BOUND)
    assert counts(found, "val")["all"] == counts(expected, "val")["all"]


def test_stages_on_the_cpu_and_a_gpu_are_the_plain_network() -> None:
    """Two kinds of devices: every hand-over is a real copy."""
    devices, images = [DEVICE, torch.device("cpu")], torch.randn(6, 3, 32, 32, dtype=torch.float64)
    plain = build_resnet("tiny", stem="imagenet").double()
    divided = deepcopy(plain)
    parts = Partition.cut(divided, (3, 32, 32), num_stages=2).modules(divided)
    stages = [stage.to(device) for stage, device in zip(parts, devices, strict=True)]
    output = StagedForward(stages, devices)(images.to(DEVICE))
    assert output.device == DEVICE
    for logits in (plain(images), output):
        logits.square().sum().backward()
    for one, other in zip(plain.parameters(), divided.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", *(["16-mixed"] if ACCELERATOR == "cuda" else [])])
def test_a_run_trains_in_a_narrow_type(tmp_path: Path, precision: str) -> None:
    run_here("fit", *FLAGS, f"--trainer.precision={precision}", f"--run_dir={tmp_path / 'run'}")


# Other tests show them on the CPU.
NAMES = ["ddp", "ddp_spawn", "pp", "fsdp2", "tp"] if ACCELERATOR == "cuda" else ["ddp", "pp"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, int]]]:
    """A checkpoint that one device without a strategy wrote, and how its test counts."""
    folder = tmp_path_factory.mktemp("gpu")
    launch("fit", *FLAGS, f"--run_dir={folder / 'run'}")
    checkpoint = folder / "run" / "checkpoints" / "last.ckpt"
    launch("test", *FLAGS, f"--ckpt_path={checkpoint}", f"--run_dir={folder / 'test'}")
    return checkpoint, counts(folder / "test")


@pytest.mark.slow
@pytest.mark.parametrize("mode", NAMES)
def test_modes_go_on_as_one_device(alone: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path, mode: str) -> None:
    """Through NCCL, with one process: it resumes that checkpoint, and its test counts as that of one device."""
    checkpoint, expected = alone
    flags = [*FLAGS, *mode_flags(mode, 1), f"--ckpt_path={checkpoint}"]
    launch("fit", *flags, "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'fit'}")
    launch("test", *flags, f"--run_dir={tmp_path / 'test'}")
    assert counts(tmp_path / "test")["all"] == expected["all"]


@pytest.mark.slow
def test_a_run_on_the_gpu_follows_the_one_device() -> None:
    flags = [flag for flag in TINY if not flag.startswith(("--trainer.accelerator", "--trainer.max_epochs"))]
    (row,) = verify(["single"], args=[*flags, f"--trainer.accelerator={ACCELERATOR}", "--trainer.precision=64-true"])
    assert row.problems == []
    assert max(row.differences.values()) <= EXACT_BOUND
