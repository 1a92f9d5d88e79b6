"""Checkpoints that a thread writes while training goes on: what is in them, when they are there, and what fails."""

import errno
import threading
import time
import warnings
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

from lit_cifar.checkpoint import lightning_io as checkpoint_io
from lit_cifar.checkpoint import step_boundary as boundary
from lit_cifar.checkpoint.callbacks import BestCheckpoint, LastCheckpoint
from lit_cifar.checkpoint.exact_resume import ExactResume
from lit_cifar.checkpoint.files import BEST, LAST, PREVIOUS, save_error, verify_checkpoint, write_checkpoint
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.checkpoint.lightning_io import CheckpointFiles
from lit_cifar.checkpoint.step_boundary import StepBoundary
from lit_cifar.errors import CheckpointError, Stopped
from lit_cifar.watchdog.activity import HELPER

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
    with files.deferring(behind=True):
        files.save_checkpoint(checkpoint, path)


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(HELPER)]


def test_what_happens_after_a_save_is_not_in_the_file(disk: Disk, tmp_path: Path) -> None:
    weights, files = torch.zeros(2, 3), CheckpointFiles()
    best = {"best.ckpt": torch.tensor(0.5)}
    checkpoint = {"state_dict": {"weights": weights, "row": weights[1]}, "callbacks": {"best": best}, "rates": [0.1]}
    save_behind(files, checkpoint, tmp_path / LAST)
    weights.fill_(1)
    best.clear()
    checkpoint["rates"].append(0.2)
    checkpoint["state_dict"].clear()
    assert not (tmp_path / LAST).exists()
    disk.allow()
    files.settle()
    found = read_checkpoint(tmp_path / LAST)
    assert [tensor.sum() for tensor in found["state_dict"].values()] == [0, 0]
    assert found["state_dict"]["row"].data_ptr() == found["state_dict"]["weights"].data_ptr() + 3 * 4
    assert found["callbacks"]["best"]["best.ckpt"] == 0.5
    assert found["rates"] == [0.1]
    assert not weights.eq(0).any()


@pytest.mark.parametrize(("names", "seen"), [([BEST, LAST, "more"], [0, 0, 1]), ([LAST, LAST], [0, 1])])
def test_one_file_is_written_and_another_waits_but_not_of_the_same_name(
    names: list[str], seen: list[int], disk: Disk, tmp_path: Path
) -> None:
    """No copy is made before there is room: so much memory, and so many steps that a kill may cost."""
    files = CheckpointFiles()
    disk.allow_soon()
    for step, name in enumerate(names):
        save_behind(files, state(step), tmp_path / name)
    files.settle()
    assert disk.seen[:-1] == seen[:-1]
    assert disk.seen[-1] >= seen[-1]
    assert disk.written == names
    assert step_of(tmp_path / names[-1]) == len(names) - 1


def test_a_failure_is_told_once_and_nothing_after_it_is_done(disk: Disk, tmp_path: Path) -> None:
    write_checkpoint(state(1), tmp_path / "old.ckpt")
    files, disk.full = CheckpointFiles(), True
    save_behind(files, state(2), tmp_path / BEST)
    save_behind(files, state(2), tmp_path / LAST)
    files.remove_checkpoint(tmp_path / "old.ckpt")
    assert files.failure is None
    disk.allow()
    files.wait()
    assert files.has_failed
    disk.full = False
    save_behind(files, state(3), tmp_path / LAST)
    assert f"{BEST} could not be saved: No space left" in str(files.failure)
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    assert not files.has_failed
    save_behind(files, state(4), tmp_path / LAST)
    files.settle()
    assert step_of(tmp_path / LAST) == 4


def test_what_cannot_be_copied_is_a_failure_like_any_other(tmp_path: Path) -> None:
    files = CheckpointFiles()
    save_behind(files, {"lock": threading.Lock()}, tmp_path / LAST)
    assert "tensors and primitives" in str(files.failure)


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


def test_a_failure_of_which_nobody_has_heard_is_raised_in_the_end(disk: Disk, tmp_path: Path) -> None:
    files, disk.full = CheckpointFiles(), True
    save_behind(files, state(1), tmp_path / LAST)
    disk.allow()
    with pytest.raises(CheckpointError, match="No space left"):
        files.teardown()


def test_it_hides_no_other_exception(disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, disk.full = CheckpointFiles(), True
    save_behind(files, state(1), tmp_path / LAST)
    disk.allow()
    try:
        raise RuntimeError("of the training")
    except RuntimeError:
        files.teardown()
    assert "No space left" in capsys.readouterr().err


def test_the_thread_leaves_what_all_threads_share_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that leave out warnings for a while put back one another's filters."""
    with monkeypatch.context() as patched:
        patched.setattr(warnings, "catch_warnings", lambda *_, **__: pytest.fail("filters are changed"))
        write_checkpoint(state(1), tmp_path / LAST)
        write_checkpoint(state(2), tmp_path / LAST)
    assert step_of(tmp_path / PREVIOUS) == 1


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


def test_training_ends_when_its_files_are_there(disk: Disk, tmp_path: Path) -> None:
    found = []
    look = At(None, lambda _: found.extend(disk.written))
    disk.allow_soon()
    fit(tmp_path / BEST, BestCheckpoint(), look)
    assert found == [BEST]
    found.clear()
    fit(tmp_path / LAST, LastCheckpoint(), look)
    assert found[-1] == LAST


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_fails_leaves_what_it_had_saved(error: type[BaseException], disk: Disk, tmp_path: Path) -> None:
    def fail(trainer: Trainer) -> None:
        disk.allow_soon()
        raise error("of the training")

    last = LastCheckpoint(every_n_steps=1)
    with pytest.raises((RuntimeError, SystemExit)):
        fit(tmp_path, StepBoundary(agree_every_s=0), At(2, fail), last)
    assert step_of_run(tmp_path) == 1
    assert not helpers()


class Unfinished(CSVLogger):
    """Fails once more when the run has failed."""

    def finalize(self, status: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_it_does_so_where_a_logger_fails_as_well(disk: Disk, tmp_path: Path) -> None:
    """Lightning then tears nothing down, and the command line says what is left."""
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


def test_a_failed_write_ends_the_run_long_before_the_next_one(
    disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.full = True
    disk.allow()
    reached: list[int] = []

    def await_failure(trainer: Trainer) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not trainer.strategy.checkpoint_io.has_failed and time.monotonic() < deadline:
            time.sleep(0.01)

    note = [At(step, lambda trainer: reached.append(trainer.global_step)) for step in range(10)]
    last = LastCheckpoint(every_n_epochs=0, every_n_steps=4)
    with pytest.raises(Stopped) as caught:
        fit(tmp_path, StepBoundary(agree_every_s=0), *note, At(5, await_failure), last, scores=(0.1,) * 3)
    assert caught.value.code == 1
    assert reached == [1, 2, 3, 4, 5]
    assert "last.ckpt could not be saved" in capsys.readouterr().err


class FullLog(CSVLogger):
    """Has once no space left, when it is told so."""

    full = False

    def save(self) -> None:
        full, self.full = self.full, False
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_where_logs_fail_the_file_that_is_being_written_is_named(
    disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = FullLog(tmp_path, name="", version="")

    class Fill(Callback):
        def on_save_checkpoint(self, trainer: Trainer, *_: object) -> None:
            if trainer.global_step == 2:
                log.full = True
                disk.allow_soon()

    callbacks = [StepBoundary(agree_every_s=0), Fill(), ExactResume(), LastCheckpoint(every_n_steps=1)]
    with pytest.raises(Stopped):
        fit(tmp_path, *callbacks, loggers=[log])
    assert (
        "metrics.csv could not be saved: No space left on device\nearlier checkpoints are unchanged: last.ckpt"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("slow", [False, True])
def test_names_do_not_depend_on_the_disk(slow: bool, disk: Disk, tmp_path: Path) -> None:
    """Of several that are kept, each new one gets a name that is free when all before it are there."""
    disk.allow_soon() if slow else disk.allow()
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


@pytest.mark.parametrize(("cause", "status"), [("signal", 143), ("loss", 1), ("weights", 1)])
def test_what_is_said_in_the_end_is_true(
    cause: str, status: int, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is named when it is there; until it is waited for, the disk does nothing."""
    said: list[str] = []
    end, settle = boundary.end_together, boundary.settle

    def listen(trainer: Trainer, message: str, *, status: int) -> None:
        said.append(message)
        assert step_of_run(tmp_path / "run") == 3
        end(trainer, message, status=status)

    def wait(trainer: Trainer) -> None:
        disk.allow()
        settle(trainer)

    monkeypatch.setattr(boundary, "end_together", listen)
    monkeypatch.setattr(boundary, "settle", wait)
    flags = [*TINY, "--last_checkpoint.every_n_steps=3", *END[cause], f"--run_dir={tmp_path / 'run'}"]
    assert run_here("fit", *flags).status == status
    assert f"the newest checkpoint is {tmp_path / 'run' / 'checkpoints' / LAST}" in said[0]


@pytest.mark.parametrize("cause", END)
def test_what_cannot_be_saved_in_the_end_is_not_called_the_newest(cause: str, disk: Disk, tmp_path: Path) -> None:
    disk.full = True
    disk.allow()
    flags = [*TINY, "--last_checkpoint.every_n_steps=3", *END[cause], f"--run_dir={tmp_path / 'run'}"]
    result = run_here("fit", *flags)
    assert result.status == 1
    assert "last.ckpt could not be saved" in result.stderr
    assert "the newest checkpoint is" not in result.stderr
