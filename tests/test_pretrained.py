"""Weights that others trained: what of a file is taken and said, and that a training in any mode starts from it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from commands import TINY, last_checkpoint, launch, mode_flags, refused, run_here
from torch import nn

from lit_cifar import LitResNet
from lit_cifar.checkpoint.pretrained import start_from_file, take_weights
from lit_cifar.errors import CheckpointError
from lit_cifar.models import build_network, build_resnet
from lit_cifar.models.fine_tuning import FineTuning

RESNET = torchvision.models.resnet18(num_classes=5).state_dict()
WRAPPED = {f"module.{name}": tensor for name, tensor in RESNET.items()}
OPTIMIZER = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": []}
COMPILED = {name.replace("layer1.", "layer1._orig_mod."): tensor for name, tensor in RESNET.items()}
BODY = {name: tensor for name, tensor in RESNET.items() if not name.startswith("fc.")}


@pytest.mark.parametrize(
    ("content", "num_classes", "says"),
    [
        (RESNET, 3, ["100 of 102 ", "new, as the file has 5 classes: fc.weight, fc.bias"]),
        ({"state_dict": {f"model.{name}": its for name, its in BODY.items()} | {"loss.w": torch.ones(5)}}, 5, [
            "100 of 102 tensors are taken, 11.19 of 11.19 M values, those of state_dict.model.*",
            "new, as the file has none: fc.weight, fc.bias",
            "not used: loss.w",
        ]),
        (BODY | {"epoch": 3}, 5, ["as the file has none: fc.weight, fc.bias"]),
        ({"lit_cifar": {"arch": "x"}, "state_dict": RESNET, "more": {"a": RESNET}}, 5, [" those of state_dict.*"]),
        (RESNET | {f"extra{number}.w": torch.ones(2) for number in range(9)}, 5, ["used: 9 names (extra0.w"]),
    ],
)  # fmt: skip
def test_what_fits_is_taken_and_the_rest_is_said(content: dict[str, Any], num_classes: int, says: list[str]) -> None:
    network = build_resnet("resnet18", stem="imagenet", num_classes=num_classes)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    said = take_weights(network, content, num_classes=num_classes)
    assert [words for words in says if words not in said] == [], said
    new = {"fc.weight", "fc.bias"} if "new, " in said else set()
    for name, tensor in network.state_dict().items():
        assert tensor.equal((before if name in new else RESNET)[name]), name
    assert len(said.splitlines()) <= 4


def test_a_part_of_a_network_takes_a_whole_file() -> None:
    body = build_resnet("resnet18", stem="imagenet", num_classes=5)
    said = take_weights(nn.ModuleDict({"body": body, "head": nn.Linear(5, 3)}), {"net": RESNET}, num_classes=3)
    assert ", those of net.*, for body.*\n  new, as the file has none: head.weight, head.bias" in said
    assert all(tensor.equal(RESNET[name]) for name, tensor in body.state_dict().items())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (RESNET, ""),
        (WRAPPED, ", those of module.*"),
        ({f"_orig_mod.{name}": tensor for name, tensor in WRAPPED.items()}, ", those of module.*"),
        (COMPILED, ""),
        ({"net": WRAPPED, "acc": 95.4, "epoch": 199}, ", those of net.module.*\n  not used: acc, epoch"),
        ({"model": RESNET, "optimizer": OPTIMIZER}, ", those of model.*\n  not used: optimizer"),
        ({"n_averaged": torch.ones(()), **WRAPPED}, ", those of module.*\n  not used: n_averaged"),
        ({"a": {"b": {"net.fc.x": torch.ones(2), **WRAPPED}}}, ", those of a.b.module.*\n  not used: net.fc.x"),
        # As torch once wrote it.
        ({name: its for name, its in RESNET.items() if name != "bn1.num_batches_tracked"}, ""),
    ],
)
def test_a_whole_network_is_found_in_files_of_other_programs(content: Any, says: str) -> None:
    network = build_resnet("resnet18", stem="imagenet", num_classes=5)
    said = take_weights(network, content, num_classes=5)
    assert said == "102 of 102 tensors are taken, 11.19 of 11.19 M values" + says
    assert all(tensor.equal(RESNET[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"model": RESNET, "model_ema": WRAPPED}, "several networks: 'model.*', 'model_ema.module.*'"),
        ({"epoch": 3}, "no weights with names and shapes of ResNet's"),
        ({**RESNET, "fc.bias": torch.ones(())}, "fc.bias is () in the check"),
        ({"other.w": torch.ones(3)}, "no weights with names and shapes"),
        ({name: torch.ones(1, 2, 3) for name in RESNET}, "no weights with names and shapes"),
        (torchvision.models.resnet50().state_dict(), "layer1.0.conv1.weight is (64, 64, 1, 1) in the check"),
    ],
)
def test_what_is_not_of_this_network_is_refused(content: dict[str, Any], problem: str) -> None:
    network = build_resnet("resnet18", stem="imagenet", num_classes=5)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        take_weights(network, content, num_classes=5)
    assert problem in error.value.problem
    assert all(tensor.equal(before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("arch", ["vit_micro", "fast"])
def test_a_classifier_of_any_network_is_left_out_by_its_shape(arch: Any) -> None:
    many, few = (build_network(arch, stem=None, num_classes=num, image_size=32) for num in (10, 3))
    expected = {name: tensor.clone() for name, tensor in many.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in few.state_dict().items()}
    assert "new, as the file has 10 classes: " in take_weights(few, expected, num_classes=3)
    for name, tensor in few.state_dict().items():
        assert tensor.equal((expected if expected[name].shape == tensor.shape else before)[name]), name


def test_weights_are_taken_in_the_networks_own_type() -> None:
    network = build_resnet("resnet18", stem="imagenet", num_classes=5)
    halves = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in RESNET.items()}
    take_weights(network, halves, num_classes=5)
    assert network.fc.weight.dtype == torch.float32
    assert network.fc.weight.equal(RESNET["fc.weight"].half().float())


def test_a_file_of_safetensors(tmp_path: Path) -> None:
    kept = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    kept.save_file(RESNET, tmp_path / "given.pth")  # the content decides
    network = build_resnet("resnet18", stem="imagenet", num_classes=5)
    start_from_file(network, tmp_path / "given.pth", num_classes=5)
    assert all(tensor.equal(RESNET[name]) for name, tensor in network.state_dict().items())
    (tmp_path / "given.pth").write_bytes((tmp_path / "given.pth").read_bytes()[:3000])
    with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
        start_from_file(network, tmp_path / "given.pth", num_classes=5)


def test_a_module_that_has_loaded_weights_reads_no_file() -> None:
    module = LitResNet("tiny", stem="imagenet", fine_tuning=FineTuning(weights="nowhere.pth"))
    module.load_state_dict(module.state_dict())  # as Lightning does when spawned processes have ended
    module.start_from_weights()


def test_without_safetensors_its_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    (tmp_path / "given").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        start_from_file(nn.Linear(1, 1), tmp_path / "given", num_classes=1)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """The file of a network `tiny` with 7 classes, as kuangliu's program writes it."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        network = build_resnet("tiny", stem="imagenet", num_classes=7)
    content = {f"module.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save({"net": content, "acc": 90.0, "epoch": 3}, tmp_path / "given.pth")
    return tmp_path / "given.pth"


def still(*flags: object) -> list[str]:
    """A fit whose rate is 0, so that it ends with the weights that it has begun with."""
    return [*TINY, "--model.optimizer=SGD", "--model.optimizer.lr=0", "--trainer.max_steps=1", *map(str, flags)]


def begun_with(run: Path, given: Path) -> bool:
    """Whether a run has begun, and ended, with the weights of the file, but for the classifier."""
    theirs, own = torch.load(given)["net"], last_checkpoint(run)["state_dict"]
    names = [name for name in own if not name.startswith("fc.") and "running" not in name and "num_" not in name]
    return all(own[name].equal(theirs[f"module.{name}"]) for name in names)


@pytest.mark.filterwarnings("ignore:the training before had lr_scheduler.total_steps")
def test_a_training_starts_from_a_file_and_a_resume_wins(given: Path, tmp_path: Path, caplog: Any) -> None:
    flags, run = still(f"--model.fine_tuning.weights={given}"), tmp_path / "run"
    with caplog.at_level("INFO"):
        run_here("fit", *flags, f"--run_dir={run}", "--resume=auto")
    assert "tensors are taken" in caplog.text
    assert begun_with(run, given)
    assert f"weights: {given}" in (run / "config.yaml").read_text()
    given.rename(tmp_path / "elsewhere.pth")
    with caplog.at_level("INFO"):
        run_here("fit", *flags, f"--run_dir={run}", "--resume=auto", "--trainer.max_steps=2")
    assert f"--model.fine_tuning.weights={given} is not read: the training goes on with the weights in " in caplog.text
    assert f"weights: {given}" in (run / "config.yaml").read_text()
    run_here("test", run, f"--run_dir={tmp_path / 'tested'}")
    # An own checkpoint gives its weights alone: no step of the training before.
    again = still(f"--model.fine_tuning.weights={run / 'checkpoints' / 'last.ckpt'}", f"--run_dir={tmp_path / 'again'}")
    run_here("fit", *again)
    assert begun_with(tmp_path / "again", tmp_path / "elsewhere.pth")
    assert last_checkpoint(tmp_path / "again")["global_step"] == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--model.arch=resnet10", ["in the model", "--model.arch=resnet18"]),
        ("--ckpt_path={}", ["holds no training of this program", "in place of --ckpt_path"]),
        ("--model.fine_tuning.weights=nowhere.pth", ["there is no checkpoint nowhere.pth"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(more: str, says: list[str], given: Path, tmp_path: Path) -> None:
    flags = still(f"--model.fine_tuning.weights={given}", *more.format(given).split(), f"--run_dir={tmp_path / 'run'}")
    refused("fit", *flags, says=says)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "ddp_spawn", "pp", "fsdp2", "tp"])
def test_every_rank_starts_from_the_file(mode: str, given: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch("fit", *still(f"--model.fine_tuning.weights={given}", *mode_flags(mode), f"--run_dir={run}"))
    assert begun_with(run, given)
