"""What a checkpoint says of itself, and that none can run code."""

import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torchvision
from commands import TINY, counts, refused, run_here

from lit_cifar.checkpoint.format import Header, holds_weights_alone, load_weights, read_checkpoint
from lit_cifar.errors import CheckpointError
from lit_cifar.models import build_resnet

HEADER = Header(arch="resnet34", stem="cifar", num_classes=10)


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


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.ckpt")
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:2000])
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "empty.ckpt").touch()
    torch.save([1, 2], tmp_path / "list.ckpt")
    reasons = dict.fromkeys(("half", "text", "pickle", "empty"), "it is incomplete, or torch has not written it")
    for name, reason in (reasons | {"list": "a list", "missing": "there is no checkpoint"}).items():
        with pytest.raises(CheckpointError, match=reason) as error:
            read_checkpoint(tmp_path / f"{name}.ckpt")
        assert len(str(error.value).splitlines()) <= 5


def test_torchs_old_format_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert read_checkpoint(tmp_path / "old.pth")["a"].tolist() == [0, 1, 2]


# ---------------------------------------------------------------- weights alone, as torchvision's files hold them


@pytest.mark.parametrize(
    ("arch", "num_classes", "problem"),
    [
        ("resnet34", 10, "layer1.2"),
        ("resnet18", 1000, None),
        ("resnet18", 10, "fc.weight"),
    ],
)
def test_weights_of_another_network_do_not_fit(arch: str, num_classes: int, problem: str | None) -> None:
    """Nor a classifier of other classes, unless a training may begin with a new one."""
    weights = torchvision.models.resnet18().state_dict()
    del weights["bn1.num_batches_tracked"]  # as in files of torch's first releases
    assert holds_weights_alone(weights)
    network = build_resnet(arch, stem="imagenet", num_classes=num_classes)
    with nullcontext() if problem is None else pytest.raises(CheckpointError, match=f"do not fit.*{problem}"):
        load_weights(network, weights, any_classes=False)


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
    assert "fc.weight is (1000, 64) in the checkpoint, (10, 64) in the model" in refused("test", *flags)


def test_given_weights_are_tested(tmp_path: Path) -> None:
    torch.save(build_resnet("tiny", stem="imagenet").state_dict(), tmp_path / "given.pth")
    result = run_here("test", *TINY, f"--ckpt_path={tmp_path / 'given.pth'}", f"--run_dir={tmp_path / 'run'}")
    assert result.status == 0, result.stderr
    assert counts(tmp_path / "run")["all"][1] == 100
