"""Checkpoints that a thread writes while training goes on: what is in them, when they are there, and what fails."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, run_here
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger
from test_checkpoint_callbacks import Score
from tiny_task import TinyData, tiny_trainer
from torn_writes import state, step_of

from lit_cifar.checkpoint import callbacks as boundary
from lit_cifar.checkpoint import files as checkpoint_io
from lit_cifar.checkpoint.callbacks import BestCheckpoint, LastCheckpoint, StepBoundary
from lit_cifar.checkpoint.files import (
    BEST,
    LAST,
    PREVIOUS,
    CheckpointFiles,
    save_error,
    verify_checkpoint,
    write_checkpoint,
)
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.errors import SaveError
from lit_cifar.watchdog import HELPER

_LIMIT_S = 30.0


class Disk:
    """Stands before the disk: writes a file when it is told to, or refuses to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[str] = []
        self.seen: list[int] = []
        self.full = False
        self._turns = threading.Semaphore(0)
        self._snapshot = checkpoint_io.snapshot
        monkeypatch.setattr(checkpoint_io, "write_checkpoint", self._write)
        monkeypatch.setattr(checkpoint_io, "snapshot", self._copy)

    def allow(self, num_files: int = 100) -> None:
        """Let so many more be written."""
        self._turns.release(num_files)

    def allow_soon(self, num_files: int = 100) -> None:
        """When this thread waits for them, most likely."""
        threading.Timer(0.2, self.allow, (num_files,)).start()

    def _write(self, checkpoint: dict[str, Any], path: Path, **settings: Any) -> None:
        assert self._turns.acquire(timeout=_LIMIT_S), "nobody went on"
        if self.full:
            raise save_error(OSError(errno.ENOSPC, "No space left on device"), path, checkpoints=path.parent)
        write_checkpoint(checkpoint, path, **settings)
        self.written.append(path.name)

    def _copy(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(len(self.written))
        return self._snapshot(checkpoint)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def save_behind(files: CheckpointFiles, checkpoint: dict[str, Any], path: Path) -> None:
    files.behind = True
    files.save_checkpoint(checkpoint, path)
    files.behind = False


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(HELPER)]


def test_what_happens_after_a_save_is_not_in_the_file(disk: Disk, tmp_path: Path) -> None:
    weights, best, files = torch.zeros(2, 3), {"best.ckpt": torch.tensor(0.5)}, CheckpointFiles()
    checkpoint = {"state_dict": {"weights": weights}, "callbacks": {"best": best}, "rates": [0.1]}
    save_behind(files, checkpoint, tmp_path / LAST)
    weights.fill_(1)
    best.clear()
    checkpoint["rates"].append(0.2)
    checkpoint["state_dict"].clear()
    assert not (tmp_path / LAST).exists()
    disk.allow()
    files.settle()
    found = read_checkpoint(tmp_path / LAST)
    assert not found["state_dict"]["weights"].any()
    assert (found["callbacks"], found["rates"]) == ({"best": {"best.ckpt": 0.5}}, [0.1])


def test_a_save_waits_for_the_one_before_it_of_the_same_name(disk: Disk, tmp_path: Path) -> None:
    """No copy is made before: so much memory, and so many steps that a kill may cost."""
    files = CheckpointFiles()
    disk.allow_soon()
    for step, name in enumerate([BEST, LAST, LAST]):
        save_behind(files, state(step), tmp_path / name)
    files.settle()
    assert disk.seen == [0, 0, 2]
    assert disk.written == [BEST, LAST, LAST]
    assert step_of(tmp_path / LAST) == 2


def test_after_a_failure_nothing_is_done_until_it_is_told(disk: Disk, tmp_path: Path) -> None:
    write_checkpoint(state(1), tmp_path / "old.ckpt")
    files, disk.full = CheckpointFiles(), True
    save_behind(files, state(2), tmp_path / BEST)
    save_behind(files, state(2), tmp_path / LAST)
    files.remove_checkpoint(tmp_path / "old.ckpt")
    disk.allow()
    files.wait()
    disk.full = False
    save_behind(files, state(3), tmp_path / LAST)
    with pytest.raises(SaveError, match=f"{BEST} could not be saved: No space left"):
        files.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    save_behind(files, state(4), tmp_path / LAST)
    files.settle()
    assert step_of(tmp_path / LAST) == 4


def save_now(files: CheckpointFiles, folder: Path) -> None:
    files.save_checkpoint(state(3), folder / "mine.ckpt")


def load(files: CheckpointFiles, folder: Path) -> None:
    assert files.load_checkpoint(folder / LAST)["global_step"] == 2


def tear_down(files: CheckpointFiles, folder: Path) -> None:
    files.teardown()


@pytest.mark.parametrize("do", [save_now, load, tear_down])
def test_what_needs_the_file_waits_for_it(
    do: Callable[[CheckpointFiles, Path], None], disk: Disk, tmp_path: Path
) -> None:
    files = CheckpointFiles()
    save_behind(files, state(2), tmp_path / LAST)
    (thread,) = helpers()
    assert not thread.daemon  # so that the end of the program waits for it
    disk.allow_soon()
    do(files, tmp_path)
    assert disk.written[0] == LAST
    assert step_of(tmp_path / LAST) == 2
    assert not helpers()


def test_what_is_to_be_removed_stays_until_what_replaces_it_is_there(disk: Disk, tmp_path: Path) -> None:
    files, old = CheckpointFiles(), tmp_path / "old.ckpt"
    old.touch()
    save_behind(files, state(1), tmp_path / BEST)
    files.remove_checkpoint(old)
    assert old.exists()
    disk.allow()
    files.settle()
    assert [path.name for path in tmp_path.iterdir()] == [BEST]


def test_a_failure_that_nobody_has_told_is_in_the_end_and_hides_no_other_exception(
    disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, disk.full = CheckpointFiles(), True
    disk.allow()
    save_behind(files, state(1), tmp_path / LAST)
    with pytest.raises(SaveError, match="No space left"):
        files.teardown()
    save_behind(files, state(1), tmp_path / LAST)
    try:
        raise RuntimeError("of the training")
    except RuntimeError:
        files.teardown()
    assert "No space left" in capsys.readouterr().err


# In runs.


class At(Checkpoint):
    """Does something after a step, or at the end of training; Lightning lets none but checkpoints come after these."""

    def __init__(self, step: int | None, do: Callable[[Trainer], object]) -> None:
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            self.do(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.step is None:
            self.do(trainer)


def fit(folder: Path, *callbacks: Callback, scores: tuple[float, ...] = (0.5,), **settings: Any) -> Trainer:
    """Three steps for each score."""
    trainer = tiny_trainer(
        folder, enable_checkpointing=True, callbacks=[*callbacks], plugins=[CheckpointFiles()], max_epochs=len(scores)
    )
    for name, value in settings.items():
        setattr(trainer, name, value)
    trainer.fit(Score(*scores), TinyData())
    return trainer


def test_training_goes_on_while_a_file_is_written(disk: Disk, tmp_path: Path) -> None:
    """What was saved before the third step is written after it."""
    last, before = LastCheckpoint(every_n_steps=2), {}

    class Saved(Callback):
        def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
            before.setdefault(trainer.global_step, module.network.scale.item())

    scale: list[float] = []

    def note(trainer: Trainer) -> None:
        scale.append(trainer.lightning_module.network.scale.item())
        disk.allow()

    fit(tmp_path, StepBoundary(agree_every_s=0), Saved(), At(3, note), last)
    assert disk.written == [LAST, LAST]
    found = read_checkpoint(tmp_path / "checkpoints" / PREVIOUS)
    assert found["global_step"] == 2
    assert found["state_dict"]["network.scale"].item() == before[2] != scale[0]
    assert found["optimizer_states"][0]["state"][0]["momentum_buffer"].item() != 0


class Unfinished(CSVLogger):
    """Fails once more when the run has failed."""

    def finalize(self, status: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_that_fails_leaves_what_it_had_saved(disk: Disk, tmp_path: Path) -> None:
    """Also where a logger fails as well: Lightning then tears nothing down, and the command line says what is left."""
    last, runs = LastCheckpoint(), []

    def fail(trainer: Trainer) -> None:
        runs.append(trainer)
        disk.allow_soon()
        raise RuntimeError("of the training")

    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path, At(1, last.save), At(2, fail), last, loggers=[Unfinished(tmp_path, name="", version="")])
    assert disk.written == [LAST]
    runs[0]._teardown()


def step_of_run(folder: Path) -> int:
    verify_checkpoint(folder / "checkpoints" / LAST)
    return int(read_checkpoint(folder / "checkpoints" / LAST)["global_step"])


def test_a_failed_write_ends_the_run_long_before_the_next_one(disk: Disk, tmp_path: Path) -> None:
    disk.full = True
    disk.allow()
    reached: list[int] = []

    def await_failure(trainer: Trainer) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while trainer.strategy.checkpoint_io.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)

    note = [At(step, lambda trainer: reached.append(trainer.global_step)) for step in range(10)]
    last = LastCheckpoint(every_n_epochs=0, every_n_steps=4)
    with pytest.raises(SaveError, match=r"last\.ckpt could not be saved"):
        fit(tmp_path, StepBoundary(agree_every_s=0), *note, At(5, await_failure), last, scores=(0.1,) * 3)
    assert reached == [1, 2, 3, 4, 5]


def test_names_do_not_depend_on_the_disk(disk: Disk, tmp_path: Path) -> None:
    """Of several that are kept, each new one gets a name that is free when all before it are there."""
    disk.allow_soon()
    trainer = fit(tmp_path, BestCheckpoint(save_top_k=2), scores=(0.1, 0.2, 0.3))
    names = {path.name: read_checkpoint(path)["global_step"] for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"best.ckpt": 9, "best-v1.ckpt": 6}
    checkpoint: Any = trainer.checkpoint_callback
    assert Path(checkpoint.best_model_path).name == "best.ckpt"


class Uploads(CSVLogger):
    """Takes every best checkpoint elsewhere."""

    uploaded: list[int] = []  # noqa: RUF012  # replaced, never changed

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.uploaded = [*self.uploaded, read_checkpoint(Path(checkpoint_callback.best_model_path))["global_step"]]


def test_a_logger_that_uploads_checkpoints_finds_them(disk: Disk, tmp_path: Path) -> None:
    disk.allow()
    uploads = Uploads(tmp_path)
    fit(tmp_path, BestCheckpoint(), scores=(0.1, 0.2), loggers=[uploads])
    assert uploads.uploaded == [3, 6]


END = {
    "signal": ["--trainer.callbacks+=stopping.SignalAfter", "--trainer.callbacks.step=3"],
    "loss": ["--trainer.callbacks+=stopping.NotANumber", "--trainer.callbacks.step=3"],
    "weights": ["--trainer.callbacks+=stopping.SpoilWeights", "--trainer.callbacks.step=5"],
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("cause", "status"), [("signal", 143), ("loss", 1), ("weights", 1)])
def test_what_is_said_in_the_end_is_true(
    cause: str, status: int, full: bool, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is named when it is there; until it is waited for, the disk does nothing."""
    settle, disk.full = boundary.settle, full

    def wait(trainer: Trainer) -> None:
        disk.allow()
        settle(trainer)
        assert step_of_run(tmp_path / "run") == 3

    monkeypatch.setattr(boundary, "settle", wait)
    flags = [*TINY, "--last_checkpoint.every_n_steps=3", *END[cause], f"--run_dir={tmp_path / 'run'}"]
    result = run_here("fit", *flags)
    assert result.status == (1 if full else status)
    newest = f"the newest checkpoint is {tmp_path / 'run' / 'checkpoints' / LAST}"
    assert (newest in result.stderr, "last.ckpt could not be saved" in result.stderr) == (not full, full)
