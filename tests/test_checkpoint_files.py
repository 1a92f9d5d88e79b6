"""Checkpoint files: what proves them whole, and that no kill, full disk or damage loses the run."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torn_writes import state, step_of

from lit_cifar.checkpoint import files as checkpoint_files
from lit_cifar.checkpoint.files import BEST, LAST, PREVIOUS, newest_valid, verify_checkpoint, write_checkpoint
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.checkpoint.lightning_io import CheckpointFiles
from lit_cifar.errors import CheckpointError, ConfigError
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


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says it were on another device."""

    device = property(lambda self: torch.device("cuda", 3))  # type: ignore[assignment]


def test_a_file_holds_tensors_of_the_cpu_wherever_they_were(tmp_path: Path) -> None:
    """Weights, an optimizer's nested state, and a view that shares memory with another tensor."""
    weights = torch.arange(12.0).view(3, 4).as_subclass(OnGPU)
    momentum, step = torch.ones(3).as_subclass(OnGPU), torch.tensor(7.0)
    checkpoint = {
        "state_dict": OrderedDict(weights=weights, row=weights[1], column=weights[:, 2]),
        "optimizer_states": [
            {"state": {0: {"momentum_buffer": momentum, "step": step}}, "param_groups": [{"lr": 0.1}]}
        ],
        "position": (1, None, "cifar"),
    }
    write_checkpoint(checkpoint, tmp_path / "a.ckpt")  # which reads it back, and refuses tensors of another class
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)
    loaded = found["state_dict"]
    assert [type(tensor) for tensor in loaded.values()] == [torch.Tensor] * 3
    assert loaded["weights"].tolist() == torch.arange(12.0).view(3, 4).tolist()
    assert (loaded["row"].tolist(), loaded["column"].tolist()) == ([4.0, 5.0, 6.0, 7.0], [2.0, 6.0, 10.0])
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1
    assert found["optimizer_states"][0]["state"][0]["momentum_buffer"].tolist() == [1.0, 1.0, 1.0]
    assert found["optimizer_states"][0]["param_groups"] == [{"lr": 0.1}]
    assert found["position"] == (1, None, "cifar")
    assert checkpoint_files._on_cpu([step], {})[0] is step  # no copy
    assert type(weights) is OnGPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_file_written_on_a_gpu_is_read_without_one(tmp_path: Path) -> None:
    weights = torch.arange(6.0, device="cuda:0")
    write_checkpoint({"weights": weights, "half": weights[3:]}, tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}
    assert found["half"].data_ptr() == found["weights"].data_ptr() + 12


def test_the_rights_of_a_file_are_those_of_any_other(tmp_path: Path) -> None:
    write_checkpoint(state(0), tmp_path / LAST)
    (tmp_path / "other").touch()
    assert (tmp_path / LAST).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_last_two_are_kept_and_one_of_any_other_name(saved: Path) -> None:
    assert_nothing_lost(saved)
    for step in (3, 4):
        write_checkpoint(state(step), saved / BEST)
    assert sorted(path.name for path in saved.iterdir()) == [BEST, LAST, PREVIOUS]
    assert step_of(saved / BEST) == 4


def test_no_shortened_file_is_taken_for_whole(tmp_path: Path) -> None:
    write_checkpoint({"a": torch.arange(20)}, tmp_path / "whole.ckpt")
    content = (tmp_path / "whole.ckpt").read_bytes()
    cut = tmp_path / "cut.ckpt"
    for num_bytes in range(len(content)):
        cut.write_bytes(content[:num_bytes])
        with pytest.raises(CheckpointError, match="truncated"):
            verify_checkpoint(cut)
    cut.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError):
        verify_checkpoint(cut)
    cut.write_bytes(content)
    verify_checkpoint(cut)


def test_no_changed_byte_is_overlooked(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint({"a": torch.arange(20)}, path)
    content = path.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            verify_checkpoint(path)


def test_the_previous_is_used_where_the_last_is_damaged(saved: Path) -> None:
    os.truncate(saved / LAST, 5000)
    path, refused = newest_valid(saved)
    assert path == saved / PREVIOUS
    assert refused == [f"{saved / LAST} is truncated, or not a checkpoint"]
    os.truncate(saved / PREVIOUS, 0)
    assert newest_valid(saved)[0] is None
    assert len(newest_valid(saved)[1]) == 2
    (saved / LAST).unlink()
    (saved / LAST).mkdir()
    assert "cannot be read: Is a directory" in newest_valid(saved)[1][0]
    assert newest_valid(saved / "missing") == (None, [])


def test_the_best_is_none_to_go_on_from(tmp_path: Path) -> None:
    write_checkpoint(state(1), tmp_path / BEST)
    assert newest_valid(tmp_path) == (None, [])


def test_a_damaged_last_does_not_become_the_previous(saved: Path) -> None:
    os.truncate(saved / LAST, 5000)
    write_checkpoint(state(3), saved / LAST)
    assert (step_of(saved / LAST), step_of(saved / PREVIOUS)) == (3, 1)


def test_a_file_without_hash_is_for_who_names_it(tmp_path: Path) -> None:
    torch.save(state(5), tmp_path / LAST)
    path, refused = newest_valid(tmp_path)
    assert path is None
    assert "carries no hash" in refused[0]
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(tmp_path / LAST)
    assert f"--ckpt_path={tmp_path / LAST}" in caught.value.remedy
    assert CheckpointFiles().load_checkpoint(tmp_path / LAST)["global_step"] == 5


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        verify_checkpoint(tmp_path / LAST)


@pytest.mark.slow
def test_a_process_killed_at_any_line_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = Path(__file__).with_name("torn_writes.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    deaths = json.loads(done.stdout)
    assert {(death["name"], tuple(death["refused"])) for death in deaths} == {(LAST, ())}
    assert Counter(death["step"] for death in deaths).keys() == {2, 3}
    assert {tuple(death["later"][:1]) for death in deaths} == {(f"{LAST} 4",)}
    assert {death["later"][1] for death in deaths} == {f"{PREVIOUS} 2", f"{PREVIOUS} 3"}
    assert all(len(death["later"]) == 2 for death in deaths), "a draft is left"
    assert max(death["drafts"] for death in deaths) == 2, "no process was killed while it wrote"
    assert len(deaths) > 50


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
    assert events == [("sync", new), (f"to {LAST}", new), (f"to {PREVIOUS}", before), ("sync", folder)]


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
    assert "reads back differently" in refusal(saved / LAST).problem
    assert_nothing_lost(saved)


@pytest.mark.parametrize("after", ["_write_synced", "verify_checkpoint"])
def test_a_folder_that_vanishes_while_it_is_written_to(
    saved: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Before what was written is read back, or while it is."""
    do = getattr(checkpoint_files, after)

    def do_and_lose(path: Path, *args: object) -> None:
        do(path, *args)
        shutil.rmtree(path.parent)

    monkeypatch.setattr(checkpoint_files, after, do_and_lose)
    assert "its folder is gone" in refusal(saved / LAST).problem


def test_a_file_system_without_hard_links(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    write_checkpoint(state(3), saved / LAST)
    assert (step_of(saved / LAST), step_of(saved / PREVIOUS)) == (3, 2)
    assert len([*saved.iterdir()]) == 2


def test_free_space_is_looked_at_before_anything_is_written(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("."))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 10**5))
    monkeypatch.setattr(checkpoint_files, "_write_synced", lambda *args: pytest.fail("written"))
    error = refusal(saved / LAST)
    assert "No space left on device (1.1 MB needed, 0.1 MB free)" in error.problem
    assert f"earlier checkpoints are unchanged: {LAST}, {PREVIOUS}" in error.problem
    assert "free some space" in error.remedy
    assert_nothing_lost(saved)


def test_a_disk_that_does_not_say_how_much_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("."))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 0))
    write_checkpoint(state(1), tmp_path / LAST)
    assert step_of(tmp_path / LAST) == 1


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


@pytest.mark.parametrize("checked", [True, False])
def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    """Seen before writing; and while writing, where another program takes the space at that moment."""
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(free - 20_000))
    if not checked:
        monkeypatch.setattr(checkpoint_files, "_check_free_space", lambda *args: None)
    error = refusal(small_disk / LAST)
    assert "No space left on device" in error.problem
    assert_nothing_lost(small_disk)
    (small_disk / "filler").unlink()
    write_checkpoint(state(3), small_disk / LAST)
    assert step_of(small_disk / LAST) == 3


def test_the_draft_of_a_killed_run_takes_no_space_from_the_next(small_disk: Path) -> None:
    free = shutil.disk_usage(small_disk).free
    (small_disk / "last.ckpt.0123abcd.part").write_bytes(bytes(free - 20_000))
    write_checkpoint(state(3), small_disk / LAST)
    assert sorted(path.name for path in small_disk.iterdir()) == [LAST, PREVIOUS]


def test_a_disk_that_became_read_only(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    error = refusal(small_disk / LAST)
    assert "Read-only file system" in error.problem
    assert "make the folder writable" in error.remedy
    assert_nothing_lost(small_disk)


@pytest.mark.skipif(os.geteuid() == 0, reason="rights do not bind root")
def test_a_folder_without_rights(saved: Path) -> None:
    saved.chmod(0o500)
    try:
        error = refusal(saved / LAST)
    finally:
        saved.chmod(0o700)
    assert "Permission denied" in error.problem
    assert_nothing_lost(saved)


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
    assert "its folder is gone" in caught.value.problem
    assert f"there is no checkpoint in {folder}" in caught.value.problem
    assert folder.exists() == put_in_its_place


@pytest.mark.parametrize("content", [Path("x"), CheckpointFiles, lambda: None])
def test_what_could_not_be_loaded_again_is_not_saved(saved: Path, content: object) -> None:
    files = CheckpointFiles()
    with files.deferring():
        files.save_checkpoint({"global_step": 3, "content": content}, saved / LAST)
    assert files.failure is not None
    assert "tensors and primitives" in str(files.failure)
    assert len(str(files.failure).splitlines()) <= 5
    assert_nothing_lost(saved)


def test_a_failure_is_kept_only_when_somebody_asks_for_it(saved: Path) -> None:
    files = CheckpointFiles()
    nowhere = saved / LAST / "below a file.ckpt"
    with files.deferring():
        files.save_checkpoint(state(3), nowhere)
    assert isinstance(files.failure, CheckpointError)
    with files.deferring():
        files.save_checkpoint(state(3), saved / LAST)
    assert files.failure is None
    with pytest.raises(CheckpointError):
        files.save_checkpoint(state(3), nowhere)


def test_lightning_reads_no_damaged_file(saved: Path) -> None:
    """Torch itself overlooks a changed byte of a tensor."""
    content = bytearray((saved / LAST).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / LAST).write_bytes(content)
    read_checkpoint(saved / LAST)
    with pytest.raises(CheckpointError, match="is damaged"):
        CheckpointFiles().load_checkpoint(saved / LAST)


def test_weights_only_is_no_choice(saved: Path) -> None:
    assert CheckpointFiles().load_checkpoint(saved / LAST, weights_only=True)["global_step"] == 2
    with pytest.raises(ConfigError, match="run code"):
        CheckpointFiles().load_checkpoint(saved / LAST, weights_only=False)


def test_removing(saved: Path) -> None:
    files = CheckpointFiles()
    files.remove_checkpoint(saved / LAST)
    files.remove_checkpoint(saved / LAST)
    assert not (saved / LAST).exists()
    with pytest.warns(UserWarning, match="could not be removed"):
        files.remove_checkpoint(saved)
