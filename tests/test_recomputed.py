"""Recomputed activations: the same bits as kept ones, in less memory.

`test_options` has `verify` in every mode.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, graded, last_checkpoint, launch, mode_flags, own_network, refused, run_here
from own_networks import Chain, DrawingBlocks, InPlace, Opaque, Remembering, Scaled
from test_exact_resume import EVERY_STEP, assert_same_end, stop_after
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_cifar import LitResNet
from lit_cifar.checkpoint.files import weights_digest
from lit_cifar.errors import ConfigError
from lit_cifar.models.recomputed import (
    FLAG,
    Recomputed,
    check_blocks,
    check_recomputed,
    keep_activations,
    recompute_blocks,
)


def network_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return DrawingBlocks() if name == "drawing" else LitResNet(arch=name).network  # type: ignore[arg-type]


def trained(network: nn.Module, *, times: int = 1) -> dict[str, Tensor]:
    """Gradients and buffers after two batches, with `times` backward passes of each."""
    torch.manual_seed(1)
    for images in torch.rand(2, 4, 3, 32, 32):
        loss = network(images).square().sum()
        for left in reversed(range(times)):
            loss.backward(retain_graph=left > 0)
    gradients = {name: its.grad for name, its in network.named_parameters() if its.grad is not None}
    return gradients | {name: buffer.clone() for name, buffer in network.named_buffers()}


@pytest.mark.parametrize("name", ["tiny", "tiny_bottleneck", "fast", "vit_micro", "drawing"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_recomputed_network_has_the_gradients_buffers_and_names_of_one_that_is_not(name: str, times: int) -> None:
    found = []
    for twice in (False, True):
        network = network_of(name)
        classes = [type(layer) for layer in network.modules()]
        if twice:
            recompute_blocks(network)
            recompute_blocks(network)  # a second time changes nothing
            assert sum(isinstance(layer, Recomputed) for layer in network.modules()) > 1
        found.append(trained(network, times=times))
        keep_activations(network)
        assert [type(layer) for layer in network.modules()] == classes
    assert [*found[0]] == [*found[1]]
    assert [key for key in found[0] if not torch.equal(found[0][key], found[1][key])] == []


def saved_bytes(network: nn.Module, images: Tensor) -> int:
    """Bytes of the activations that are kept between forward and backward."""
    storages: dict[int, int] = {}
    own = {its.untyped_storage().data_ptr() for its in [*network.parameters(), *network.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        network(images)
    return sum(storages.values())


def test_blocks_keep_their_inputs_alone() -> None:
    network, images = network_of("resnet18"), torch.rand(2, 3, 32, 32)
    kept = saved_bytes(network, images)
    recompute_blocks(network)
    assert saved_bytes(network, images) < 0.35 * kept
    network.eval()
    plain = saved_bytes(network, images)
    keep_activations(network)
    assert plain == saved_bytes(network, images), "an evaluation computes once"


def test_a_network_must_say_blocks_of_several_layers() -> None:
    check_blocks(Chain())
    single = nn.Sequential(nn.Conv2d(3, 4, kernel_size=3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))
    for network in (Opaque(), single):
        with pytest.raises(ConfigError, match=f"{type(network).__name__} does not say that it has any") as error:
            LitResNet(network=network, recompute=True)
        assert "blocks()" in error.value.remedy


@pytest.mark.parametrize(("network", "problem"), [(InPlace, "inplace"), (Remembering, r"weight differs")])
def test_blocks_that_do_not_compute_the_same_twice_are_refused(network: type[nn.Module], problem: str) -> None:
    for right in (DrawingBlocks(), Scaled()):
        check_recomputed(right, (3, 32, 32))
    with pytest.raises(ConfigError, match=f"of {network.__name__} does not compute the same twice: .*{problem}"):
        check_recomputed(network(), (3, 32, 32))


def test_what_cannot_be_recomputed_is_refused_on_the_command_line() -> None:
    refused("fit", *own_network("Opaque"), "--model.network.num_classes=10", FLAG, says=["Opaque", "blocks()"])
    refused("fit", *own_network("InPlace"), FLAG, says=["InPlace does not compute the same twice"])
    refused("fit", *TINY, FLAG, "--model.compile=true", says=["chooses by itself", "one of the two"])


MODES: dict[str, list[str]] = {
    **{mode: mode_flags(mode) for mode in ("single", "dp", "mp", "ddp", "ddp_spawn", "ddp_flat", "fsdp2", "tp")},
    "ddp_mp": mode_flags("ddp_mp", 4),
    "ddp_pp": mode_flags("ddp_pp", 4),
    "microbatches": mode_flags("LayerParallelStrategy", num_microbatches=2),
    "synchronised": [*mode_flags("ddp"), "--trainer.sync_batchnorm=true"],
    "accumulated": [*mode_flags("ddp"), "--trainer.accumulate_grad_batches=2"],
    "bf16": [*mode_flags("ddp"), "--trainer.precision=bf16-mixed"],
    "sharded bf16": [*mode_flags("fsdp2"), "--trainer.precision=bf16-mixed"],
    "ghost": ["--model.ghost_batchnorm.data_parallel_size=2"],
    "channels_last": ["--model.channels_last=true"],
    "virtual": ["--virtual_replicas=4"],
    **{f"virtual {mode}": [*mode_flags(mode), "--virtual_replicas=4"] for mode in ("dp", "mp", "ddp", "pp", "fsdp2")},
    **{
        schedule: mode_flags("PipelineStrategy", schedule=schedule, num_microbatches=4)
        for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    },
}
HERE = ("single", "dp", "mp", "microbatches", "ghost", "virtual")  # of one process
DRAWING = own_network("DrawingBlocks")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "network"),
    graded(
        *((mode, "drawing") for mode in HERE if mode != "ghost"),
        ("single", "vit_micro"),
        slow=[("ghost", "tiny"), *((mode, "tiny") for mode in MODES if mode not in HERE)],
        exhaustive=[(mode, "drawing") for mode in MODES if mode not in (*HERE, "tp")],
    ),
)
def test_a_run_ends_with_the_same_bits(mode: str, network: str, tmp_path: Path) -> None:
    flags = DRAWING if network == "drawing" else [*TINY, f"--model.arch={network}"]
    if network == "vit_micro":
        flags = [flag for flag in flags if "stem" not in flag]
    command: Any = run_here if mode in HERE else launch
    digests = set()
    for value in ("false", "true"):
        run = tmp_path / value
        command("fit", *flags, *MODES[mode], f"--model.recompute={value}", f"--run_dir={run}")
        digests.add(weights_digest(last_checkpoint(run)["state_dict"]))
    assert len(digests) == 1


@pytest.mark.parametrize(("first", "second"), [("false", "true"), ("true", "false")])
def test_a_run_that_is_resumed_within_an_epoch_may_change_it(first: str, second: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fitting = ["fit", *DRAWING, "--trainer.num_sanity_val_steps=0", EVERY_STEP]
    run_here(*fitting, f"--run_dir={whole}")
    stopped = run_here(*fitting, f"--run_dir={parts}", f"--model.recompute={first}", *stop_after(2), check=False)
    assert stopped.status == 143
    run_here(*fitting, f"--run_dir={parts}", f"--model.recompute={second}", "--resume=auto")
    assert_same_end(parts, whole)
