"""Checkpoint files: what proves them whole, that no kill, full disk or damage loses the run, and what they say."""

import errno
import os
import pickle
import resource
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import before_each_line, state, step_of
from commands import TINY, refused
from threads import on_ranks

from lit_cifar.checkpoint import atomic
from lit_cifar.checkpoint import files as checkpoint_files
from lit_cifar.checkpoint.atomic import BEST, LAST, PREVIOUS, newest_valid, write_checkpoint
from lit_cifar.checkpoint.compatibility import check_classes, check_header
from lit_cifar.checkpoint.files import DIGESTS, CheckpointFiles, note_epoch, weights_digest
from lit_cifar.checkpoint.format import Header, TrainedOn, read_checkpoint
from lit_cifar.errors import CheckpointError, ConfigError, SaveError
from lit_cifar.reporting.files import make_folder, replace_csv


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with step 2 as the last and step 1 as the previous checkpoint."""
    for step in (1, 2):
        write_checkpoint(state(step), tmp_path / LAST)
    return tmp_path


def assert_nothing_lost(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [LAST, PREVIOUS]
    assert newest_valid(folder) == (folder / LAST, [])
    assert (step_of(folder / LAST), step_of(folder / PREVIOUS)) == (2, 1)


def test_no_shortened_file_is_read_and_no_other_content_than_was_written(tmp_path: Path) -> None:
    """Between its parts a file has bytes that nobody reads."""
    path = tmp_path / "a.ckpt"
    write_checkpoint({"a": torch.arange(20)}, path)
    content = path.read_bytes()
    num_refused = 0
    for position in range(0, len(content), 3):
        path.write_bytes(content[:position])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            found = read_checkpoint(path)
        except CheckpointError:
            num_refused += 1
        else:
            assert found.keys() == {"a"}
            assert found["a"].equal(torch.arange(20))
    assert num_refused > 160  # the 20 numbers alone have as many bytes


def test_the_previous_is_used_where_the_last_is_damaged(saved: Path) -> None:
    write_checkpoint(state(9), saved / BEST)  # none to resume from
    os.truncate(saved / LAST, 5000)
    path, refused = newest_valid(saved)
    assert path == saved / PREVIOUS
    assert f"{saved / LAST} is not a readable checkpoint: it is incomplete" in refused[0]
    write_checkpoint(state(3), saved / LAST)
    assert (step_of(saved / LAST), step_of(saved / PREVIOUS)) == (3, 1)  # the damaged one was not kept
    os.truncate(saved / PREVIOUS, 0)
    (saved / LAST).unlink()
    (saved / LAST / ".metadata").mkdir(parents=True)
    path, refused = newest_valid(saved)
    assert path is None
    assert "is of before version 0.2.0" in refused[0]
    assert newest_valid(saved / "missing") == (None, [])


def test_lightning_reads_no_damaged_file_and_runs_no_code(saved: Path) -> None:
    """Torch itself overlooks a changed byte of a tensor."""
    with pytest.raises(ConfigError, match="run code"):
        CheckpointFiles().load_checkpoint(saved / LAST, weights_only=False)
    content = bytearray((saved / LAST).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / LAST).write_bytes(content)
    torch.load(saved / LAST, weights_only=True)
    with pytest.raises(CheckpointError, match="is damaged"):
        CheckpointFiles().load_checkpoint(saved / LAST)


def test_the_first_process_reads_for_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the others have found; they raise what it raises."""
    read: list[Path] = []
    monkeypatch.setattr(checkpoint_files, "read_checkpoint", lambda path: read.append(path) or read_checkpoint(path))

    def load(rank: int) -> Any:
        try:
            return CheckpointFiles().load_checkpoint(saved / (PREVIOUS if rank else LAST))
        except CheckpointError as error:
            return error.problem

    for content in on_ranks(3, load):
        assert content.keys() == state(2).keys()
        assert content["weights"].equal(state(2)["weights"])
    assert read == [saved / LAST]
    (saved / LAST).unlink()
    assert on_ranks(3, load) == [f"there is no checkpoint {saved / LAST}"] * 3


def test_a_kill_at_any_line_leaves_a_whole_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the folder before each line of the code that saves step 3 where steps 1 and 2 are."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and a kill loses nothing that has been written
    found, drafts = [], []

    def look() -> None:
        path, refused = newest_valid(saved)
        found.append((path and path.name, path and step_of(path), *refused))
        drafts.append([file.name for file in saved.iterdir() if file.suffix == ".part"])

    with before_each_line(atomic, look=look):
        write_checkpoint(state(3), saved / LAST)
    assert set(found) == {(LAST, 2), (PREVIOUS, 2), (LAST, 3)}
    assert [f"{LAST}.part"] in drafts
    (saved / f"{LAST}.part").write_bytes(b"of a process that was killed")
    write_checkpoint(state(4), saved / LAST)
    assert sorted((path.name, step_of(path)) for path in saved.iterdir()) == [(LAST, 4), (PREVIOUS, 3)]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was synced, or renamed to what, in this order; with its inode."""
    events: list[tuple[str, int]] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        events.append(("sync", os.fstat(descriptor).st_ino))

    def note_replace(path: Path, target: Path) -> Path:
        events.append((f"to {target.name}", path.stat().st_ino))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    return events


def test_content_is_on_the_disk_before_its_name_is(saved: Path, events: list[tuple[str, int]]) -> None:
    """A kill cannot show this: what is not synced is lost only with the power."""
    before = (saved / LAST).stat().st_ino
    write_checkpoint(state(3), saved / LAST)
    new, folder = (saved / LAST).stat().st_ino, saved.stat().st_ino
    assert events == [("sync", new), (f"to {PREVIOUS}", before), (f"to {LAST}", new), ("sync", folder)]


def test_what_a_checkpoint_counts_on_is_on_the_disk_before_it(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    """The names of new folders, and the lines of `metrics.csv`, of which some were appended."""
    run = tmp_path / "runs" / "first"
    make_folder(run)
    replace_csv(run / "metrics.csv", [["step"], [0]])
    with (run / "metrics.csv").open("a") as file:
        file.write("1\n")
    CheckpointFiles().save_checkpoint(state(1), run / "checkpoints" / LAST)
    root, runs, first, table = (path.stat().st_ino for path in (tmp_path, run.parent, run, run / "metrics.csv"))
    made = [("sync", runs), ("sync", root), ("sync", table), ("to metrics.csv", table)]
    assert events[:7] == [*made, ("sync", first), ("sync", table), ("sync", first)]
    assert (f"to {LAST}", (run / "checkpoints" / LAST).stat().st_ino) in events[7:]


def test_a_disk_that_returns_something_else(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = atomic._write_synced

    def write_badly(path: Path, content: bytes) -> None:
        middle = len(content) // 2
        write(path, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])

    monkeypatch.setattr(atomic, "_write_synced", write_badly)
    with pytest.raises(CheckpointError, match="cannot be read back"):
        write_checkpoint(state(3), saved / LAST)
    assert_nothing_lost(saved)


def test_a_limit_met_while_writing(saved: Path) -> None:
    """As the end of a disk is, or a quota."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(state(3), saved / LAST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"File too large\nearlier checkpoints are unchanged: {LAST}, {PREVIOUS}" in caught.value.problem
    assert "free some space" in caught.value.remedy
    assert_nothing_lost(saved)


@pytest.mark.parametrize("content", [Path("x"), threading.Lock()])
def test_what_could_not_be_loaded_again_is_not_saved(saved: Path, content: object) -> None:
    with pytest.raises(SaveError, match="tensors and primitives"):
        CheckpointFiles().save_checkpoint({"global_step": 3, "content": content}, saved / LAST)
    assert_nothing_lost(saved)


@pytest.mark.parametrize("put_in_its_place", [False, True])
def test_a_vanished_folder(saved: Path, put_in_its_place: bool) -> None:
    folder = saved / "checkpoints"
    files = CheckpointFiles()
    files.save_checkpoint(state(1), folder / LAST)
    shutil.rmtree(folder)
    if put_in_its_place:
        folder.touch()
    with pytest.raises(CheckpointError) as caught:
        files.save_checkpoint(state(2), folder / LAST)
    assert f"there is no checkpoint in {folder}" in caught.value.problem
    assert folder.exists() == put_in_its_place
    files.remove_checkpoint(folder.parent / "not there")  # says nothing
    with pytest.warns(UserWarning, match="could not be removed"):
        files.remove_checkpoint(saved)


HEADER = Header(arch="resnet34", stem="cifar", num_classes=10)


@pytest.mark.parametrize("other", [{"arch": "resnet18"}, {"stem": "imagenet"}, {"num_classes": 100}])
def test_another_network_is_named_with_the_flags_it_needs(other: dict[str, object]) -> None:
    fields = {"arch": "resnet34", "stem": "cifar", "num_classes": 10} | other
    checkpoint: dict[str, object] = {}
    Header(**fields).write(checkpoint)
    with pytest.raises(CheckpointError) as error:
        check_header(checkpoint, HEADER)
    assert "resnet34 with the cifar stem and 10 classes" in error.value.problem
    for name, value in other.items():  # the number of classes is that of the data
        flag = "config.yaml" if name == "num_classes" else f"--model.{name}={value}"
        assert flag in error.value.remedy
    with pytest.raises(CheckpointError, match="no lit_cifar header"):
        check_header({}, HEADER)


AB = ("a", "b")


@pytest.mark.parametrize(
    ("there", "here", "problem"),
    [
        (("cifar10", AB), ("cifar10", AB), None),
        (("folder", AB), ("folder", ("b", "a")), "class 0 is a in the checkpoint and b in"),
        (("folder", AB), ("folder", (*AB, "c")), "class 2 is nothing in the checkpoint and c in"),
        (("folder", (*AB, "c")), ("folder", AB), "class 2 is c in the checkpoint and nothing in"),
        (("folder", ("a, b", "c")), ("folder", ("a", "b, c")), "class 0 is a, b in the checkpoint and a in"),
        (("folder", tuple("abcdefgh")), ("folder", tuple("abcdefgi")), r"\('a', 'b', 'c', 'd', 'e', 'f', ...\), and"),
        (("cifar10", AB), ("folder", AB), "trained on cifar10, which is normalised otherwise than folder"),
        (None, ("folder", AB), "does not say which classes"),
    ],
)
@pytest.mark.parametrize("normalised", [False, True])
def test_classes_are_compared_by_name(there: Any, here: Any, problem: str | None, normalised: bool) -> None:
    checkpoint: dict[str, Any] = {}
    if there is not None:
        TrainedOn(*there).write(checkpoint)
    warns = there is None or (there[1] == here[1] and not normalised)
    expected = pytest.warns(UserWarning, match=problem) if warns else pytest.raises(CheckpointError, match=problem)
    with nullcontext() if problem is None else expected:
        check_classes(checkpoint, TrainedOn(*here), normalised=normalised)


@pytest.mark.parametrize(
    "words",
    ["fit --resume", "fit --ckpt_path", "test --ckpt_path", "predict --ckpt_path", "fit --model.fine_tuning.weights"],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_checkpoint_of_before_names_the_commit_that_reads_it(words: str, is_folder: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = run / "checkpoints" / LAST
    if is_folder:
        (file / ".metadata").mkdir(parents=True)
    else:
        file.parent.mkdir(parents=True)
        header = {"arch": "tiny", "stem": "imagenet", "num_classes": 10, "image_size": 32, "network": None}
        torch.save({"lit_cifar": header, "state_dict": {}, "optimizer_states": []}, file)
    into, value = (run, "auto") if "resume" in words else (tmp_path / "new", file)
    said = refused(*f"{words}={value}".split(), *TINY, f"--run_dir={into}", says=["`git checkout 23031ca` reads it"])
    assert said.count("23031ca") == 1
    assert [*tmp_path.iterdir(), *file.parent.iterdir()] == [run, file]


def test_unreadable_files_are_refused_and_torchs_old_format_is_read(tmp_path: Path) -> None:
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
    torch.save({"a": torch.arange(3)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert read_checkpoint(tmp_path / "old.pth")["a"].tolist() == [0, 1, 2]


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
    assert weights_digest(other) != weights_digest(WEIGHTS)
    assert weights_digest({"b": WEIGHTS["b"], "a": WEIGHTS["a"].t().contiguous().t()}) == weights_digest(WEIGHTS)


def test_a_line_replaces_those_of_later_epochs_and_damaged_ones(tmp_path: Path) -> None:
    (tmp_path / DIGESTS).write_bytes(bytes(9))
    for epoch, step in [(0, 3), (1, 0), (2, 0), (2, 5), (3, 0), (2, 0)]:  # the last one is of a run that was resumed
        note_epoch({"position": {"epoch": epoch, "step": step}, "state_dict": WEIGHTS}, tmp_path)
    lines = [f"{weights_digest(WEIGHTS)}  epoch {epoch}\n" for epoch in (0, 1)]
    assert (tmp_path / DIGESTS).read_text() == "".join(lines)
    assert [path.name for path in tmp_path.iterdir()] == [DIGESTS]


def test_a_checkpoint_is_never_there_before_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed between the two would go on without it."""
    lines: list[str] = []
    monkeypatch.setattr(checkpoint_files, "write_checkpoint", lambda *_: lines.append((tmp_path / DIGESTS).read_text()))
    checkpoint = {"position": {"epoch": 1, "step": 0}, "state_dict": WEIGHTS}
    CheckpointFiles().save_checkpoint(checkpoint, tmp_path / "checkpoints" / "last.ckpt")
    assert lines == [f"{weights_digest(WEIGHTS)}  epoch 0\n"]


def test_a_file_that_may_not_be_read_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "other.ckpt").touch()

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"other\.ckpt cannot be read: Permission denied"):
        read_checkpoint(file)
