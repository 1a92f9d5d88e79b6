"""What a checkpoint says of itself, weights alone, and the digests of weights that are written beside checkpoints."""

import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torchvision
from commands import TINY, counts, refused, run_here

from lit_cifar.checkpoint import files as checkpoint_files
from lit_cifar.checkpoint.files import DIGESTS, CheckpointFiles, digest, note_epoch
from lit_cifar.checkpoint.format import Header, holds_weights_alone, load_weights, read_checkpoint
from lit_cifar.errors import CheckpointError, SaveError
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


# ---------------------------------------------------------------- `weights.sha256`, a line for every epoch that ended

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7)}


@pytest.mark.parametrize(
    "other",
    [
        {"a": WEIGHTS["a"], "c": WEIGHTS["b"]},
        {"a": WEIGHTS["a"].view(3, 2), "b": WEIGHTS["b"]},
        {"a": WEIGHTS["a"].double(), "b": WEIGHTS["b"]},
        {"a": WEIGHTS["a"].nextafter(torch.tensor(9.0)), "b": WEIGHTS["b"]},
        {"a": WEIGHTS["a"]},
    ],
    ids=["name", "shape", "dtype", "last bit", "missing"],
)
def test_every_difference_changes_the_digest(other: dict[str, torch.Tensor]) -> None:
    assert digest(other) != digest(WEIGHTS)
    assert digest({"b": WEIGHTS["b"], "a": WEIGHTS["a"].t().contiguous().t()}) == digest(WEIGHTS)


def test_a_line_replaces_those_of_later_epochs(tmp_path: Path) -> None:
    for epoch, step in [(0, 3), (1, 0), (2, 0), (2, 5), (3, 0), (2, 0)]:  # the last one is of a run that was resumed
        note_epoch({"position": {"epoch": epoch, "step": step}, "state_dict": WEIGHTS}, tmp_path)
    assert (tmp_path / DIGESTS).read_text() == "".join(f"{digest(WEIGHTS)}  epoch {epoch}\n" for epoch in (0, 1))
    assert [path.name for path in tmp_path.iterdir()] == [DIGESTS]


def test_a_checkpoint_is_never_there_before_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed between the two would go on without it."""
    lines: list[str] = []
    monkeypatch.setattr(checkpoint_files, "write_checkpoint", lambda *_: lines.append((tmp_path / DIGESTS).read_text()))
    checkpoint = {"position": {"epoch": 1, "step": 0}, "state_dict": WEIGHTS}
    CheckpointFiles().save_checkpoint(checkpoint, tmp_path / "checkpoints" / "last.ckpt")
    assert lines == [f"{digest(WEIGHTS)}  epoch 0\n"]


def test_a_damaged_line_is_dropped_and_an_error_names_this_file(tmp_path: Path) -> None:
    (tmp_path / DIGESTS).write_bytes(f"{digest(WEIGHTS)}  epoch 0\n".encode() + bytes(9))
    checkpoint = {"position": {"epoch": 2, "step": 0}, "state_dict": WEIGHTS}
    note_epoch(checkpoint, tmp_path)
    assert (tmp_path / DIGESTS).read_text().splitlines() == [f"{digest(WEIGHTS)}  epoch {epoch}" for epoch in (0, 1)]
    (tmp_path / f"{DIGESTS}.part").mkdir()
    with pytest.raises(SaveError, match=rf"{DIGESTS} could not be saved: Is a directory"):
        CheckpointFiles().save_checkpoint(checkpoint, tmp_path / "checkpoints" / "last.ckpt")
