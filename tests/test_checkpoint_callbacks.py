"""When `best.ckpt` and `last.ckpt` are written, and who hears of it when they cannot be."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, launch, mode_flags
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny_task import TinyData, TinyTask, tiny_trainer

from lit_cifar.checkpoint.callbacks import BestCheckpoint, LastCheckpoint
from lit_cifar.checkpoint.files import BEST, LAST, PREVIOUS, CheckpointFiles, newest_valid, verify_checkpoint
from lit_cifar.checkpoint.format import read_checkpoint

STEPS = 3  # of an epoch of TinyData


class Boundary(Callback):
    """Saves at the start of a step what is due by then, and notes the step."""

    def __init__(self, last: LastCheckpoint) -> None:
        self.last = last
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.last.due_by_step(trainer):
            self.last.save(trainer)
            self.steps.append(trainer.global_step)


class Score(TinyTask):
    """Logs the accuracies it is given, an epoch each."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = scores

    def on_validation_epoch_end(self) -> None:
        self.log("val/acc", torch.tensor(self.scores[self.current_epoch]))


def fit(
    folder: Path,
    *,
    last: LastCheckpoint | None = None,
    scores: tuple[float, ...] = (0.5,),
    callbacks: tuple[Callback, ...] = (),
    ckpt_path: Path | None = None,
    **settings: Any,
) -> tuple[Trainer, list[int]]:
    """Train for as many epochs as there are scores; the trainer, and the steps before which it saved."""
    last = last or LastCheckpoint()
    boundary = Boundary(last)
    trainer = tiny_trainer(
        folder,
        enable_checkpointing=True,
        callbacks=[*callbacks, boundary, BestCheckpoint(), last],
        plugins=[CheckpointFiles()],
        **{"max_epochs": len(scores)} | settings,
    )
    trainer.fit(Score(*scores), TinyData(), ckpt_path=ckpt_path, weights_only=True)
    return trainer, boundary.steps


def steps_in(folder: Path) -> dict[str, int]:
    """The step of each checkpoint of a run."""
    found = {}
    for path in (folder / "checkpoints").iterdir():
        verify_checkpoint(path)
        found[path.name] = read_checkpoint(path)["global_step"]
    return found


def test_the_best_the_last_and_the_previous(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, scores=(0.2, 0.9, 0.4))
    assert steps_in(tmp_path) == {BEST: 2 * STEPS, LAST: 3 * STEPS, PREVIOUS: 2 * STEPS}
    checkpoint: Any = trainer.checkpoint_callback
    assert Path(checkpoint.best_model_path) == tmp_path / "checkpoints" / BEST


def test_without_validation_there_is_no_best(tmp_path: Path) -> None:
    _, steps = fit(tmp_path, limit_val_batches=0, accumulate_grad_batches=2, last=LastCheckpoint(every_n_steps=1))
    assert steps == [1]  # accumulated batches are one step
    assert steps_in(tmp_path) == {LAST: 2, PREVIOUS: 1}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [3, 6, 9]),
        ({"every_n_epochs": 2}, [6]),
        ({"every_n_epochs": 0}, []),
        ({"every_n_epochs": 0, "every_n_steps": 4}, [4, 8]),
        ({"every_n_epochs": 2, "every_n_steps": 4}, [4, 6, 8]),
        ({"every_n_epochs": 0, "every_n_steps": 100}, []),
    ],
)
def test_what_is_due_by_the_step(tmp_path: Path, settings: dict[str, int], steps: list[int]) -> None:
    """The end of the last epoch is no start of a step: it is saved at the end of training."""
    _, found = fit(tmp_path, last=LastCheckpoint(**settings), scores=(0.1,) * 4)
    assert found == steps
    assert steps_in(tmp_path)[LAST] == 4 * STEPS


def test_a_trial_run_leaves_nothing(tmp_path: Path) -> None:
    fit(tmp_path, fast_dev_run=True)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_that_goes_on_where_another_was_replaces_its_best(tmp_path: Path) -> None:
    """Killed after the best was saved, it does not know of that file."""
    fit(tmp_path, scores=(0.5,))
    shutil.copy(tmp_path / "checkpoints" / LAST, tmp_path / "after one epoch.ckpt")
    fit(tmp_path, scores=(0.5, 0.9))
    _, steps = fit(tmp_path, scores=(0.5, 0.9), ckpt_path=tmp_path / "after one epoch.ckpt")
    assert steps == []  # what it begins with is not saved once more
    assert steps_in(tmp_path) == {BEST: 2 * STEPS, LAST: 2 * STEPS, PREVIOUS: 2 * STEPS}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("best", [0.9, 0.3])
def test_a_run_whose_folder_was_moved_knows_its_best(tmp_path: Path, best: float) -> None:
    """A worse epoch does not replace it, a better one does."""
    fit(tmp_path / "run", scores=(best,))
    (tmp_path / "run").rename(tmp_path / "moved")
    last = tmp_path / "moved" / "checkpoints" / LAST
    trainer, _ = fit(tmp_path / "moved", scores=(best, 0.5), ckpt_path=last)
    assert steps_in(tmp_path / "moved")[BEST] == (STEPS if best > 0.5 else 2 * STEPS)
    assert not (tmp_path / "run").exists()
    checkpoint: Any = trainer.checkpoint_callback
    assert checkpoint.best_model_path == str(tmp_path / "moved" / "checkpoints" / BEST)
    assert float(checkpoint.best_model_score) == pytest.approx(max(best, 0.5))


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_a_run_that_begins_with_anothers_checkpoint_ranks_its_own(tmp_path: Path) -> None:
    fit(tmp_path / "run", scores=(0.9,))
    fit(tmp_path / "other", scores=(0.9, 0.5), ckpt_path=tmp_path / "run" / "checkpoints" / LAST)
    assert steps_in(tmp_path / "other")[BEST] == 2 * STEPS
    assert steps_in(tmp_path / "run")[BEST] == STEPS


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("full", "problem", "left"),
    [
        (True, "could not be saved: No space left on device", "earlier checkpoints are unchanged: last.ckpt"),
        (False, "could not be saved: No such file or directory", "there is no checkpoint in"),
    ],
)
def test_logs_that_cannot_be_written_end_the_run(
    full: bool, problem: str, left: str, num_processes: int, tmp_path: Path
) -> None:
    """They are on the same disk as the checkpoints, and most often the first to notice."""
    flags = [*TINY, *mode_flags("single" if num_processes == 1 else "ddp"), f"--run_dir={tmp_path / 'run'}"]
    failing = ["--trainer.callbacks+=checkpoint_faults.LoseRunFolder", f"--trainer.callbacks.full={full}"]
    result = launch("fit", *flags, "--last_checkpoint.every_n_steps=1", *failing, check=False, ranks=num_processes)
    assert result.status == 1
    _, _, message = result.stderr.rpartition("lit_cifar: ")
    assert problem in message
    assert left in message
    if full and num_processes == 1:  # the others show where rank 0 was as well
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("pp", marks=pytest.mark.exhaustive),
        pytest.param("fsdp2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_cannot_save_fails_in_every_process(tmp_path: Path, mode: str) -> None:
    flags = [*TINY, *mode_flags(mode), "--trainer.callbacks+=checkpoint_faults.NoFolder"]
    result = launch("fit", *flags, f"--run_dir={tmp_path / 'run'}", check=False, ranks=2)
    assert result.status != 0
    assert ".ckpt could not be saved" in result.stderr
    assert "Traceback" not in result.stderr
    assert not newest_valid(tmp_path / "run" / "checkpoints")[0]
