"""`weights.sha256`: a line for every epoch that ended, also in a run that was interrupted."""

from pathlib import Path

import pytest
import torch
from commands import TINY, run_here

from lit_cifar.checkpoint import files as checkpoint_files
from lit_cifar.checkpoint.files import DIGESTS, CheckpointFiles, digest, note_epoch
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.errors import SaveError

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


def test_a_run_writes_them(tmp_path: Path) -> None:
    flags = ["fit", *TINY, "--trainer.max_epochs=2", f"--run_dir={tmp_path}"]
    assert run_here(*flags, "--trainer.max_steps=7").status == 0
    (first,) = (tmp_path / DIGESTS).read_text().splitlines()
    with pytest.warns(UserWarning, match="has 7 optimizer steps, this run has 10"):
        assert run_here(*flags, "--resume=auto").status == 0
    last = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["state_dict"]
    assert (tmp_path / DIGESTS).read_text().splitlines() == [first, f"{digest(last)}  epoch 1"]
