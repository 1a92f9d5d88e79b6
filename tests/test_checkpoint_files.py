"""Checkpoint files: what proves them whole, and that no kill, full disk or damage loses the run."""

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torn_writes import state, step_of

from lit_cifar.checkpoint import files as checkpoint_files
from lit_cifar.checkpoint.files import (
    BEST,
    LAST,
    PREVIOUS,
    CheckpointFiles,
    newest_valid,
    verify_checkpoint,
    write_checkpoint,
)
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.errors import CheckpointError, ConfigError, SaveError
from lit_cifar.reporting.files import make_folder, replace_csv


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with step 2 as the last and step 1 as the previous checkpoint."""
    for step in (1, 2):
        write_checkpoint(state(step), tmp_path / LAST)
    return tmp_path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a file system of four megabytes, with steps 1 and 2."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)] if mount else ["false"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        for step in (1, 2):
            write_checkpoint(state(step), folder / LAST)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def refusal(path: Path, step: int = 3) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(state(step), path)
    assert len(str(caught.value).splitlines()) <= 5
    return caught.value


def assert_nothing_lost(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir() if path.name != "filler") == [LAST, PREVIOUS]
    assert newest_valid(folder) == (folder / LAST, [])
    assert (step_of(folder / LAST), step_of(folder / PREVIOUS)) == (2, 1)


def test_a_file_carries_its_hash_and_is_read_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint(state(7), path)
    verify_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.comment.startswith(b"sha256=")
        assert archive.testzip() is None
    for mmap in (True, False):
        found = torch.load(path, mmap=mmap, weights_only=True)
        assert found["global_step"] == 7
        assert found["weights"].eq(7).all()
    with path.open("rb") as file:
        assert torch.load(file, weights_only=True)["name"] == "tiny"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_file_written_on_a_gpu_is_read_without_one(tmp_path: Path) -> None:
    CheckpointFiles().save_checkpoint({"weights": torch.arange(6.0, device="cuda:0")}, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["weights"].device.type == "cpu"


def test_no_shortened_or_changed_file_is_taken_for_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint({"a": torch.arange(20)}, path)
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position])
        with pytest.raises(CheckpointError, match="truncated"):
            verify_checkpoint(path)
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            verify_checkpoint(path)


def test_the_previous_is_used_where_the_last_is_damaged(saved: Path) -> None:
    write_checkpoint(state(9), saved / BEST)  # none to resume from
    os.truncate(saved / LAST, 5000)
    path, refused = newest_valid(saved)
    assert path == saved / PREVIOUS
    assert f"{saved / LAST} carries no hash of its content: it is truncated" in refused[0]
    write_checkpoint(state(3), saved / LAST)
    assert (step_of(saved / LAST), step_of(saved / PREVIOUS)) == (3, 1)  # the damaged one was not kept
    os.truncate(saved / PREVIOUS, 0)
    (saved / LAST).unlink()
    (saved / LAST).mkdir()
    path, refused = newest_valid(saved)
    assert path is None
    assert "cannot be read: Is a directory" in refused[0]
    assert newest_valid(saved / "missing") == (None, [])


def test_a_file_without_hash_is_for_who_names_it(tmp_path: Path) -> None:
    torch.save(state(5), tmp_path / LAST)
    path, refused = newest_valid(tmp_path)
    assert path is None
    assert "carries no hash" in refused[0]
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(tmp_path / LAST)
    assert f"--ckpt_path={tmp_path / LAST}" in caught.value.remedy
    assert CheckpointFiles().load_checkpoint(tmp_path / LAST)["global_step"] == 5


def test_lightning_reads_no_damaged_file_and_runs_no_code(saved: Path) -> None:
    """Torch itself overlooks a changed byte of a tensor."""
    with pytest.raises(ConfigError, match="run code"):
        CheckpointFiles().load_checkpoint(saved / LAST, weights_only=False)
    content = bytearray((saved / LAST).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / LAST).write_bytes(content)
    read_checkpoint(saved / LAST)
    with pytest.raises(CheckpointError, match="is damaged"):
        CheckpointFiles().load_checkpoint(saved / LAST)


@pytest.mark.slow
def test_a_process_killed_at_any_line_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = Path(__file__).with_name("torn_writes.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    deaths = json.loads(done.stdout)
    found = {(death["name"], death["step"], *death["refused"]) for death in deaths}
    assert found == {(LAST, 2), (PREVIOUS, 2), (LAST, 3)}  # the second one between two renames
    assert {tuple(death["later"]) for death in deaths} == {(f"{LAST} 4", f"{PREVIOUS} {step}") for step in (2, 3)}
    assert max(death["drafts"] for death in deaths) == 1, "no process was killed while it wrote"
    assert len(deaths) > 40


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
    write = checkpoint_files._write_synced

    def write_badly(path: Path, content: bytes) -> None:
        middle = len(content) // 2
        write(path, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])

    monkeypatch.setattr(checkpoint_files, "_write_synced", write_badly)
    assert "cannot be read back" in refusal(saved / LAST).problem
    assert_nothing_lost(saved)


def test_a_folder_that_vanishes_while_it_is_written_to(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint_files._write_synced

    def write_and_lose(path: Path, content: bytes) -> None:
        write(path, content)
        shutil.rmtree(path.parent)

    monkeypatch.setattr(checkpoint_files, "_write_synced", write_and_lose)
    assert "No such file or directory" in refusal(saved / LAST).problem


def test_a_limit_met_while_writing(saved: Path) -> None:
    """As a quota is: the file system had space."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        error = refusal(saved / LAST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in error.problem
    assert_nothing_lost(saved)


def test_a_full_disk(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 20_000))
    error = refusal(small_disk / LAST)
    assert f"No space left on device\nearlier checkpoints are unchanged: {LAST}, {PREVIOUS}" in error.problem
    assert "free some space" in error.remedy
    assert_nothing_lost(small_disk)
    (small_disk / "filler").unlink()
    write_checkpoint(state(3), small_disk / LAST)
    assert step_of(small_disk / LAST) == 3


def test_a_disk_that_became_read_only(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "Read-only file system" in refusal(small_disk / LAST).problem
    assert_nothing_lost(small_disk)


@pytest.mark.parametrize("content", [Path("x"), CheckpointFiles, lambda: None, threading.Lock()])
def test_what_could_not_be_loaded_again_is_not_saved(saved: Path, content: object) -> None:
    with pytest.raises(SaveError, match="tensors and primitives") as error:
        CheckpointFiles().save_checkpoint({"global_step": 3, "content": content}, saved / LAST)
    assert len(str(error.value).splitlines()) <= 5
    assert_nothing_lost(saved)


def test_removing(saved: Path) -> None:
    files = CheckpointFiles()
    files.remove_checkpoint(saved / LAST)
    files.remove_checkpoint(saved / LAST)
    assert not (saved / LAST).exists()
    with pytest.warns(UserWarning, match="could not be removed"):
        files.remove_checkpoint(saved)


@pytest.mark.parametrize("put_in_its_place", [False, True])
def test_a_vanished_folder(saved: Path, tmp_path: Path, put_in_its_place: bool) -> None:
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
