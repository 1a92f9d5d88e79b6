"""What a checkpoint says of itself, and that none can run code."""

import pickle
from pathlib import Path

import pytest
import torch

from lit_cifar.checkpoints import Header, add_prefix, read_checkpoint, strip_prefix
from lit_cifar.errors import CheckpointError

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


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.ckpt")
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:2000])
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    (tmp_path / "empty.ckpt").touch()
    torch.save([1, 2], tmp_path / "list.ckpt")
    for name in ("half", "text", "empty", "list", "missing"):
        with pytest.raises(CheckpointError) as error:
            read_checkpoint(tmp_path / f"{name}.ckpt")
        assert len(str(error.value).splitlines()) <= 5


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
