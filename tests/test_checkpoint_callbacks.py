"""When `best.ckpt` and `last.ckpt` are written, by a thread while training goes on, and who hears of a failure."""

import errno
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import state, step_of
from commands import TINY, callback, graded, launch, logged, mode_flags, run_here
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tiny_task import TinyData, TinyTask, tiny_trainer

from lit_cifar.checkpoint import files as checkpoint_io
from lit_cifar.checkpoint.atomic import BEST, LAST, PREVIOUS, newest_valid, save_error, write_checkpoint
from lit_cifar.checkpoint.callbacks import BestCheckpoint, LastCheckpoint, StepBoundary
from lit_cifar.checkpoint.files import CheckpointFiles
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.errors import SaveError

STEPS = 3  # of an epoch of TinyData
_LIMIT_S = 30.0


class Score(TinyTask):
    """Logs the accuracies it is given, an epoch each."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = scores

    def on_validation_epoch_end(self) -> None:
        self.log("val/acc", torch.tensor(self.scores[self.current_epoch]))


def fit(
    folder: Path, *callbacks: Callback, scores: tuple[float, ...] = (0.5,), resume: Path | None = None, **settings: Any
) -> Trainer:
    """Train for as many epochs as there are scores."""
    settings = {"enable_checkpointing": True, "plugins": [CheckpointFiles()], "max_epochs": len(scores)} | settings
    trainer = tiny_trainer(folder, callbacks=[*callbacks], **settings)
    trainer.fit(Score(*scores), TinyData(), ckpt_path=resume, weights_only=True)
    return trainer


def fit_and_save(folder: Path, *, last: LastCheckpoint | None = None, **settings: Any) -> tuple[Trainer, list[int]]:
    """The trainer, and the steps before which it saved."""
    due, steps = last or LastCheckpoint(every_n_epochs=1), list[int]()

    def save(trainer: Trainer, *_: Any) -> None:
        if due.due_by_step(trainer):
            due.save(trainer)
            steps.append(trainer.global_step)

    return fit(folder, LambdaCallback(on_train_batch_start=save), BestCheckpoint(), due, **settings), steps


def steps_in(folder: Path) -> dict[str, int]:
    """The step of each checkpoint of a run."""
    return {path.name: read_checkpoint(path)["global_step"] for path in (folder / "checkpoints").iterdir()}


def test_without_validation_there_is_no_best(tmp_path: Path) -> None:
    last = LastCheckpoint(every_n_steps=1)
    _, steps = fit_and_save(tmp_path, limit_val_batches=0, accumulate_grad_batches=2, last=last)
    assert steps == [1]  # accumulated batches are one step
    assert steps_in(tmp_path) == {LAST: 2, PREVIOUS: 1}


@pytest.mark.parametrize(
    ("every", "steps"),
    [({"epochs": 1}, [3, 6, 9]), ({"epochs": 0, "steps": 4}, [4, 8]), ({"epochs": 2, "steps": 4}, [4, 6, 8])],
)
def test_what_is_due_by_the_step(tmp_path: Path, every: dict[str, int], steps: list[int]) -> None:
    """The end of the last epoch is no start of a step: it is saved at the end of training."""
    last = LastCheckpoint(**{f"every_n_{unit}": number for unit, number in every.items()})
    _, found = fit_and_save(tmp_path, last=last, scores=(0.1,) * 4)
    assert found == steps
    assert steps_in(tmp_path)[LAST] == 4 * STEPS


def test_the_end_of_an_epoch_is_saved_at_most_every_30_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step takes four seconds here."""
    clock, last, steps = Mock(**{"monotonic.return_value": 0.0}), LastCheckpoint(), list[int]()
    save = last.save
    monkeypatch.setattr("lit_cifar.checkpoint.callbacks.time", clock)
    monkeypatch.setattr(last, "save", lambda trainer: [steps.append(trainer.global_step), save(trainer)])
    tick = LambdaCallback(
        on_train_batch_start=lambda trainer, *_: clock.monotonic.configure_mock(return_value=4.0 * trainer.global_step)
    )
    fit(tmp_path, tick, StepBoundary(), last, scores=(0.1,) * 7)
    assert steps == [9, 18, 21]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_that_goes_on_where_another_was_replaces_its_best(tmp_path: Path) -> None:
    """Killed after the best was saved, it does not know of that file."""
    fit_and_save(tmp_path, scores=(0.5,))
    shutil.copy(tmp_path / "checkpoints" / LAST, tmp_path / "after one epoch.ckpt")
    fit_and_save(tmp_path, scores=(0.5, 0.9))
    _, steps = fit_and_save(tmp_path, scores=(0.5, 0.9), resume=tmp_path / "after one epoch.ckpt")
    assert steps == []  # what it begins with is not saved once more
    assert steps_in(tmp_path) == {BEST: 2 * STEPS, LAST: 2 * STEPS, PREVIOUS: 2 * STEPS}
    worse, _ = fit_and_save(tmp_path, scores=(0.5, 0.4), resume=tmp_path / "after one epoch.ckpt")
    checkpoint: Any = worse.checkpoint_callback
    assert float(checkpoint.best_model_score) == pytest.approx(0.4)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("best", [0.9, 0.3])
def test_a_run_whose_folder_was_moved_knows_its_best(tmp_path: Path, best: float) -> None:
    """A worse epoch does not replace it, a better one does."""
    fit_and_save(tmp_path / "run", scores=(best,))
    (tmp_path / "run").rename(tmp_path / "moved")
    last = tmp_path / "moved" / "checkpoints" / LAST
    trainer, _ = fit_and_save(tmp_path / "moved", scores=(best, 0.5), resume=last)
    assert steps_in(tmp_path / "moved")[BEST] == (STEPS if best > 0.5 else 2 * STEPS)
    assert not (tmp_path / "run").exists()
    checkpoint: Any = trainer.checkpoint_callback
    assert checkpoint.best_model_path == str(tmp_path / "moved" / "checkpoints" / BEST)
    assert float(checkpoint.best_model_score) == pytest.approx(max(best, 0.5))


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_a_run_that_begins_with_anothers_checkpoint_ranks_its_own(tmp_path: Path) -> None:
    fit_and_save(tmp_path / "run", scores=(0.9,))
    fit_and_save(tmp_path / "other", scores=(0.9, 0.5), resume=tmp_path / "run" / "checkpoints" / LAST)
    assert steps_in(tmp_path / "other")[BEST] == 2 * STEPS
    assert steps_in(tmp_path / "run")[BEST] == STEPS


LOGS = ("metrics.csv", "events")
FULL = ["could not be saved: No space left on device", "earlier checkpoints are unchanged: last.ckpt"]
GONE = ["could not be saved: No such file or directory", "there is no checkpoint in"]
# The logs are on the same disk as the checkpoints, and most often the first to notice.
FAULTS = {name: (callback("stopping.LoseRunFolder", full=name), FULL) for name in LOGS} | {
    "gone": (callback("stopping.LoseRunFolder"), GONE),
    "no folder": (callback("stopping.NoFolder"), [".ckpt could not be saved"]),
}


@pytest.mark.parametrize(
    ("mode", "fault"),
    graded(
        *(("single", fault) for fault in (*LOGS, "gone")),
        slow=[("ddp", fault) for fault in FAULTS],
        exhaustive=[(mode, "no folder") for mode in ("pp", "fsdp2")],
    ),
)
def test_a_run_that_cannot_save_fails_in_every_process(mode: str, fault: str, tmp_path: Path) -> None:
    failing, words = FAULTS[fault]
    flags = [*mode_flags(mode), *failing, "--last_checkpoint.every_n_steps=1", f"--run_dir={tmp_path / 'run'}"]
    result = launch("fit", *TINY, *flags, check=False, ranks=1 if mode == "single" else 2)
    assert result.status == 1
    message = result.stderr.rpartition("lit_cifar: ")[2]
    assert [each for each in words if each not in message] == []
    # Where a logger fails, the other process shows where rank 0 was.
    assert (mode == "ddp" and fault in LOGS) or fault == "gone" or "Traceback" not in result.stderr
    assert (newest_valid(tmp_path / "run" / "checkpoints")[0] is not None) == (fault in LOGS)


def test_a_disk_that_is_full_before_training_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(TensorBoardLogger, "log_hyperparams", Mock(side_effect=full))
    result = run_here("fit", *TINY, f"--run_dir={tmp_path / 'run'}", check=False)
    assert result.status == 1
    assert f"{tmp_path / 'run'} could not be saved: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


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

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        assert self._turns.acquire(timeout=_LIMIT_S), "nobody went on"
        if self.full:
            raise save_error(OSError(errno.ENOSPC, "No space left on device"), path, checkpoints=path.parent)
        write_checkpoint(checkpoint, path)
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
    return [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_what_happens_after_a_save_is_not_in_the_file(disk: Disk, tmp_path: Path) -> None:
    """Nor is what it replaces removed before the file is there."""
    weights, best, files = torch.zeros(2, 3), {"best.ckpt": torch.tensor(0.5)}, CheckpointFiles()
    (tmp_path / "old.ckpt").touch()
    seen = {"set": {1}, "counts": Counter([1]), "bytes": bytearray(b"1")}
    checkpoint = {"state_dict": {"weights": weights}, "callbacks": {"best": best}, "rates": [0.1], "seen": seen}
    save_behind(files, checkpoint, tmp_path / LAST)
    weights.fill_(1)
    best.clear()
    checkpoint["rates"].append(0.2)
    checkpoint["state_dict"].clear()
    for own in seen.values():
        own.clear()  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    disk.allow_soon()
    files.remove_checkpoint(tmp_path / "old.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == [LAST]
    found = read_checkpoint(tmp_path / LAST)
    assert not found["state_dict"]["weights"].any()
    assert (found["callbacks"], found["rates"]) == ({"best": {"best.ckpt": 0.5}}, [0.1])
    assert found["seen"] == {"set": {1}, "counts": {1: 1}, "bytes": b"1"}


def test_a_save_waits_for_the_one_before_it_of_the_same_name(disk: Disk, tmp_path: Path) -> None:
    """No copy is made before: so much memory, and so many steps that a kill may cost."""
    files = CheckpointFiles()
    save_behind(files, state(0), tmp_path / BEST)
    save_behind(files, state(1), tmp_path / LAST)
    disk.allow_soon()
    save_behind(files, state(2), tmp_path / LAST)
    files.settle()
    assert disk.seen == [0, 0, 2]
    assert disk.written == [BEST, LAST, LAST]
    assert step_of(tmp_path / LAST) == 2


def test_after_a_failure_nothing_is_done_until_it_is_told(disk: Disk, tmp_path: Path) -> None:
    write_checkpoint(state(1), tmp_path / "old.ckpt")
    files, disk.full = CheckpointFiles(), True
    save_behind(files, state(2), tmp_path / BEST)
    save_behind(files, state(2), tmp_path / LAST)
    disk.allow()
    files.wait()
    disk.full = False
    save_behind(files, state(3), tmp_path / LAST)
    with pytest.raises(SaveError, match=f"{BEST} could not be saved: No space left"):
        files.remove_checkpoint(tmp_path / "old.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    save_behind(files, state(4), tmp_path / LAST)
    files.settle()
    assert step_of(tmp_path / LAST) == 4


@pytest.mark.parametrize(
    "do",
    [
        lambda files, folder: files.save_checkpoint(state(3), folder / "mine.ckpt"),
        lambda files, folder: files.load_checkpoint(folder / LAST),
        lambda files, folder: files.teardown(),
    ],
    ids=["save", "load", "tear down"],
)
def test_who_needs_the_file_waits(do: Callable[[CheckpointFiles, Path], None], disk: Disk, tmp_path: Path) -> None:
    files = CheckpointFiles()
    save_behind(files, state(2), tmp_path / LAST)
    (thread,) = helpers()
    assert not thread.daemon  # so that the end of the program waits for it
    disk.allow_soon()
    do(files, tmp_path)
    assert disk.written[0] == LAST
    assert step_of(tmp_path / LAST) == 2
    assert not helpers()


def test_an_untold_failure_hides_no_exception(disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


class At(Checkpoint):
    """Does something after a step; Lightning lets none but checkpoints come after these."""

    def __init__(self, step: int, do: Callable[[Trainer], object]) -> None:
        self.step, self.do = step, do

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            self.do(trainer)


def test_training_goes_on_while_a_file_is_written(disk: Disk, tmp_path: Path) -> None:
    """What was saved before the third step is written after it."""
    fit(tmp_path, StepBoundary(agree_every_s=0), At(3, lambda trainer: disk.allow()), LastCheckpoint(every_n_steps=2))
    assert disk.written == [LAST, LAST]
    assert read_checkpoint(tmp_path / "checkpoints" / PREVIOUS)["global_step"] == 2


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
        fit(tmp_path, At(1, last.save), At(2, fail), last, logger=[Unfinished(tmp_path, name="", version="")])
    assert disk.written == [LAST]
    runs[0]._teardown()


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


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_averaged_weights_are_validated_and_saved(tmp_path: Path) -> None:
    """Beside those that are trained, with which a resumed run goes on."""
    average = callback("lightning.pytorch.callbacks.EMAWeightAveraging", decay=0.5)
    run = tmp_path / "run"
    run_here("fit", *TINY, *average, f"--run_dir={run}")
    for name in (BEST, LAST):
        saved = run / "checkpoints" / name
        run_here("validate", *TINY, f"--ckpt_path={saved}", f"--run_dir={tmp_path / name}")
        found, known = ([row["val/loss"] for row in logged(of) if "val/loss" in row] for of in (tmp_path / name, run))
        assert found == known
        file = read_checkpoint(saved)
        assert not file["current_model_state"]["network.fc.weight"].equal(file["state_dict"]["fc.weight"])


class Uploads(CSVLogger):
    """Takes every best checkpoint elsewhere."""

    uploaded: list[int] = []  # noqa: RUF012  # replaced, never changed

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.uploaded = [*self.uploaded, read_checkpoint(Path(checkpoint_callback.best_model_path))["global_step"]]


def test_a_logger_that_uploads_checkpoints_finds_them(disk: Disk, tmp_path: Path) -> None:
    disk.allow()
    uploads = Uploads(tmp_path)
    fit(tmp_path, BestCheckpoint(), scores=(0.1, 0.2), logger=[uploads])
    assert uploads.uploaded == [3, 6]


@pytest.mark.parametrize("full", [False, True])
def test_the_last_words_are_true(full: bool, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint is named when it is there; until it is waited for, the disk does nothing."""
    wait, disk.full = CheckpointFiles.wait, full
    last = tmp_path / "run" / "checkpoints" / LAST
    monkeypatch.setattr(CheckpointFiles, "wait", lambda files: (disk.allow(), wait(files)))
    flags = ["--last_checkpoint.every_n_steps=3", *callback("stopping.SignalAfter", step=3)]
    result = run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}", check=False)
    assert result.status == (1 if full else 143)
    newest = f"the newest checkpoint is {last}"
    assert (newest in result.stderr, "last.ckpt could not be saved" in result.stderr) == (not full, full)
    assert full or read_checkpoint(last)["global_step"] == 3
