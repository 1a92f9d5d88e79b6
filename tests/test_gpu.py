"""The package on one GPU; where there is none all skips, saying so.

    pytest tests/test_gpu.py            what one process can show
    pytest -m slow tests/test_gpu.py    what starts processes: every mode that one GPU can run

`LIT_CIFAR_GPU_TESTS=cpu` runs these tests on the CPU, so that they keep working where there is no GPU.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from commands import TINY, counts, launch, run_here
from torch import Tensor, nn

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.data.augment import Augmentation
from lit_cifar.data.batch_split import BatchSplit, GhostBatches
from lit_cifar.data.images import ImageSet
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.models import build_resnet
from lit_cifar.models.ghost_batchnorm import normalise_apart
from lit_cifar.models.partition import Partition
from lit_cifar.strategies.dp import replicate
from lit_cifar.strategies.mp import StagedRunner
from lit_cifar.tools.verify import verify
from lit_cifar.tools.verify.comparison import EXACT_BOUND

IMAGE = (3, 32, 32)

ACCELERATOR = os.environ.get("LIT_CIFAR_GPU_TESTS", "cuda")
DEVICE = torch.device(ACCELERATOR, 0) if ACCELERATOR == "cuda" else torch.device(ACCELERATOR)

pytestmark = [
    pytest.mark.skipif(ACCELERATOR == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),  # the first run on a GPU loads its libraries
]

FLAGS = [flag for flag in TINY if "accelerator" not in flag]
FLAGS += [f"--trainer.accelerator={ACCELERATOR}", "--trainer.devices=1"]


def images_of(num_images: int) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.arange(num_images) % 10, tuple("abcdefghij"), "random")


def test_augmentation_gives_the_same_bytes() -> None:
    images, ids = images_of(64).images, torch.arange(64) * 2**33 + 5
    augmentation = Augmentation(seed=2**61, cutout=8)
    draws, drawn_there = (augmentation.draw(place, (32, 32), epoch=3) for place in (ids, ids.to(DEVICE)))
    assert drawn_there.cpu().equal(draws)
    assert augmentation(images.to(DEVICE), drawn_there).cpu().equal(augmentation(images, draws))


def test_batches_made_on_the_device_are_those_of_the_host() -> None:
    images, sampler = images_of(40), TrainSampler(num_samples=40, batch_size=16, batch_split=BatchSplit())
    there, here = (
        list(BatchLoader(place, sampler, augmentation=Augmentation(seed=1))) for place in (images.to(DEVICE), images)
    )
    assert len(there) == len(here) == 3
    for found, expected in zip(there, here, strict=True):
        assert found.weight == expected.weight
        for name in ("images", "labels", "ids"):
            assert getattr(found, name).device == DEVICE
            assert getattr(found, name).cpu().equal(getattr(expected, name))


def trained(network: nn.Module, run: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, Tensor]:
    """Logits of a batch with a ragged cut, gradients and running statistics, on the CPU."""
    images = torch.randn(15, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = run(images.to(device))
    nn.functional.cross_entropy(logits, torch.arange(15, device=logits.device) % 10).backward()
    found = {"logits": logits, **dict(network.named_buffers())}
    found |= {f"{name}.grad": parameter.grad for name, parameter in network.named_parameters()}
    return {name: value.detach().cpu() for name, value in found.items()}


@pytest.mark.parametrize(
    ("chunks", "runner"),
    [
        pytest.param(GhostBatches(), lambda network: network, id="single"),
        pytest.param(
            GhostBatches(replicas_per_shard=2), lambda network: replicate(network, [DEVICE] * 2), id="two replicas"
        ),
        pytest.param(
            GhostBatches(num_microbatches=2),
            lambda network: StagedRunner(
                [stage.module(network) for stage in Partition.of(network, IMAGE, num_stages=2).stages],
                [DEVICE] * 2,
                num_microbatches=2,
            ),
            id="two stages, two microbatches",
        ),
    ],
)
def test_a_step_is_that_of_one_cpu(
    chunks: GhostBatches, runner: Callable[[nn.Module], Callable[[Tensor], Tensor]]
) -> None:
    torch.manual_seed(0)
    network = build_resnet("resnet10", stem="imagenet").double()
    alone = normalise_apart(build_resnet("resnet10", stem="imagenet"), chunks).double()
    alone.load_state_dict(network.state_dict())
    there = deepcopy(network).to(DEVICE)
    found = trained(there, runner(there), DEVICE)
    expected = trained(alone, alone, torch.device("cpu"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=EXACT_BOUND, atol=EXACT_BOUND, msg=name)


HALF = ["16-mixed"] if ACCELERATOR == "cuda" else []
RUNS = {
    "auto": [],
    "images on the host": ["--data.resident=host"],
    "mp": ["--trainer.strategy=LayerParallelStrategy", "--trainer.strategy.num_stages=2"],
    **{precision: [f"--trainer.precision={precision}"] for precision in ["bf16-mixed", "bf16-true", "64-true", *HALF]},
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_in_this_process_trains_and_leaves_cpu_tensors(tmp_path: Path, run: str) -> None:
    result = run_here("fit", *FLAGS, *RUNS[run], f"--run_dir={tmp_path / 'run'}")
    assert result.status == 0, result.stderr
    checkpoint = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    states = checkpoint["optimizer_states"][0]["state"].values()
    tensors = [*checkpoint["state_dict"].values(), *(value for state in states for value in state.values())]
    assert {value.device.type for value in tensors if isinstance(value, Tensor)} == {"cpu"}


# Other tests show them on the CPU.
NAMES = ["ddp", "ddp_spawn", "pp", "fsdp2", "tp"] if ACCELERATOR == "cuda" else ["ddp"]
STARTED = {
    **{name: [f"--trainer.strategy={name}"] for name in NAMES},
    "pp, interleaved": [
        *("--trainer.strategy=PipelineStrategy", "--trainer.strategy.schedule=Interleaved1F1B"),
        "--trainer.strategy.num_microbatches=2",
    ],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, int]]]:
    """A checkpoint that one device without a strategy wrote, and how its test counts."""
    folder = tmp_path_factory.mktemp("gpu")
    launch("fit", *FLAGS, f"--run_dir={folder / 'run'}")
    checkpoint = folder / "run" / "checkpoints" / "last.ckpt"
    launch("test", *FLAGS, f"--ckpt_path={checkpoint}", f"--run_dir={folder / 'test'}")
    return checkpoint, counts(folder / "test")


@pytest.mark.slow
@pytest.mark.parametrize("mode", STARTED)
def test_every_mode_goes_on_and_counts_as_one_device(
    alone: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path, mode: str
) -> None:
    """Through NCCL, with one process: it resumes that checkpoint, and its test counts as that of one device."""
    checkpoint, expected = alone
    flags = [*FLAGS, *STARTED[mode], f"--ckpt_path={checkpoint}"]
    launch("fit", *flags, "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'fit'}")
    launch("test", *flags, f"--run_dir={tmp_path / 'test'}")
    assert counts(tmp_path / "test")["all"] == expected["all"]


@pytest.mark.slow
def test_a_run_on_the_gpu_follows_the_one_device() -> None:
    flags = [flag for flag in TINY if not flag.startswith(("--trainer.accelerator", "--trainer.max_epochs"))]
    (row,) = verify(["single"], args=[*flags, f"--trainer.accelerator={ACCELERATOR}", "--trainer.precision=64-true"])
    assert row.problems == []
    assert max(row.differences.values()) <= EXACT_BOUND
