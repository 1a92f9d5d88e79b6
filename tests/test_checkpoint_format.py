"""What a checkpoint says of itself, and that none can run code."""

import pickle
from pathlib import Path

import pytest
import torch
import torchvision
from commands import TINY, counts, run_here

from lit_cifar.checkpoint.format import (
    Header,
    add_prefix,
    holds_weights_alone,
    load_weights,
    read_checkpoint,
    strip_prefix,
)
from lit_cifar.errors import CheckpointError
from lit_cifar.models import build_resnet

HEADER = Header(arch="resnet34", stem="cifar", num_classes=10)


class Payload:
    """Pickles to a call that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_header_round_trip(tmp_path: Path) -> None:
    checkpoint: dict[str, object] = {"state_dict": {"conv1.weight": torch.ones(2)}}
    HEADER.write(checkpoint)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    HEADER.check(read_checkpoint(tmp_path / "a.ckpt"))


@pytest.mark.parametrize("other", [{"arch": "resnet18"}, {"stem": "imagenet"}, {"num_classes": 100}])
def test_another_network_is_named_with_the_flags_it_needs(other: dict[str, object]) -> None:
    fields = {"arch": "resnet34", "stem": "cifar", "num_classes": 10} | other
    checkpoint: dict[str, object] = {}
    Header(**fields).write(checkpoint)
    with pytest.raises(CheckpointError) as error:
        HEADER.check(checkpoint)
    assert "resnet34 with the cifar stem and 10 classes" in error.value.problem
    for name, value in other.items():
        assert f"--model.{name}={value}" in error.value.remedy


@pytest.mark.parametrize("checkpoint", [{}, {"lit_cifar": 3}, {"lit_cifar": {"arch": "resnet34"}}])
def test_a_checkpoint_without_header_is_refused(checkpoint: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="no lit_cifar header"):
        HEADER.check(checkpoint)


@pytest.mark.parametrize("mmap", [True, False])
def test_unreadable_files_are_refused(tmp_path: Path, mmap: bool) -> None:
    """And what is said of them is about the file, not about torch's ways to read one."""
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.ckpt")
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:2000])
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "empty.ckpt").touch()
    torch.save([1, 2], tmp_path / "list.ckpt")
    reasons = {
        "half": "it is truncated",
        "text": "torch has not written it",
        "pickle": "torch has not written it",
        "empty": "it is empty",
        "list": "a list",
        "missing": "there is no checkpoint",
    }
    for name, reason in reasons.items():
        with pytest.raises(CheckpointError, match=reason) as error:
            read_checkpoint(tmp_path / f"{name}.ckpt", mmap=mmap)
        assert len(str(error.value).splitlines()) <= 5


def test_torchs_old_format_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert read_checkpoint(tmp_path / "old.pth")["a"].tolist() == [0, 1, 2]


# ---------------------------------------------------------------- weights alone, as torchvision's files hold them


@pytest.mark.parametrize("arch", ["resnet18", "resnet34", "resnet50", "wide_resnet50_2"])
def test_weights_of_torchvision_are_known_by_their_shapes(arch: str) -> None:
    with torch.device("meta"):
        weights = getattr(torchvision.models, arch)().state_dict()
    assert holds_weights_alone(weights)
    Header(arch=arch, stem="imagenet", num_classes=1000).check_weights(weights, any_classes=False)
    for other in ({"arch": "resnet10"}, {"stem": "strided"}):
        asked = Header(**{"arch": arch, "stem": "imagenet", "num_classes": 10} | other)
        with pytest.raises(CheckpointError, match=f"--model.arch={arch} --model.stem=imagenet --model.num_classes=10"):
            asked.check_weights(weights, any_classes=True)


@pytest.mark.parametrize("arch", ["tiny", "tiny_bottleneck", "resnet10"])
def test_networks_of_equal_depth_are_told_apart_by_their_width(arch: str) -> None:
    weights = build_resnet(arch, stem="imagenet").state_dict()
    Header(arch=arch, stem="imagenet", num_classes=10).check_weights(weights, any_classes=False)


def test_weights_of_other_networks_are_refused() -> None:
    with torch.device("meta"):
        others = [torchvision.models.resnext50_32x4d().state_dict(), torchvision.models.alexnet().state_dict()]
    for weights in others:
        with pytest.raises(CheckpointError, match="resnet10, resnet18, resnet34"):
            HEADER.check_weights(weights, any_classes=True)


def test_weights_without_some_names_do_not_fit() -> None:
    weights = build_resnet("resnet10").state_dict()
    del weights["bn1.weight"]
    with pytest.raises(CheckpointError, match=r"do not fit.*bn1\.weight"):
        load_weights(build_resnet("resnet10"), weights)


def test_a_training_begins_with_given_weights_and_a_classifier_of_its_own(tmp_path: Path) -> None:
    given = build_resnet("tiny", stem="imagenet", num_classes=1000).state_dict()
    torch.save(given, tmp_path / "given.pth")
    flags = [*TINY, f"--ckpt_path={tmp_path / 'given.pth'}"]
    keep = ["--trainer.callbacks+=recorder.KeepFirstWeights", f"--trainer.callbacks.path={tmp_path / 'first.pt'}"]
    assert run_here("fit", *flags, *keep, f"--run_dir={tmp_path / 'run'}").status == 0
    first = torch.load(tmp_path / "first.pt", weights_only=True)
    assert first.keys() == given.keys()
    assert all(first[name].equal(given[name]) for name in given if not name.startswith("fc."))
    assert first["fc.weight"].shape == (10, 64)
    position = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["position"]
    assert (position["epoch"], position["global_step"]) == (1, 5)
    refused = run_here("test", *flags)
    assert refused.status == 2
    assert "have 1000 classes, the model has 10" in refused.stderr


def test_given_weights_are_tested(tmp_path: Path) -> None:
    torch.save(build_resnet("tiny", stem="imagenet").state_dict(), tmp_path / "given.pth")
    result = run_here("test", *TINY, f"--ckpt_path={tmp_path / 'given.pth'}", f"--run_dir={tmp_path / 'run'}")
    assert result.status == 0, result.stderr
    assert counts(tmp_path / "run")["all"][1] == 100


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_checkpoint_cannot_run_code(tmp_path: Path, writer: str) -> None:
    evil = {"state_dict": Payload(tmp_path / "owned")}
    if writer == "torch":
        torch.save(evil, tmp_path / "evil.ckpt")
    else:
        (tmp_path / "evil.ckpt").write_bytes(pickle.dumps(evil))
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path / "evil.ckpt")
    assert writer == "pickle" or "it needs the code of" in error.value.problem
    assert not (tmp_path / "owned").exists()


def test_prefixes_are_inverse() -> None:
    plain = {"conv1.weight": 1, "network.odd": 2}
    assert strip_prefix(add_prefix(plain)) == plain
