"""What the loggers leave: events that a resumed run hides, and one row for each step in `metrics.csv`."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import TINY, logged, refused, run_here
from lightning.pytorch.loggers.logger import DummyLogger
from tiny_task import read_events

from lit_cifar.reporting.loggers import run_loggers


@pytest.mark.parametrize("first_step", [0, 2])
def test_what_a_run_writes_again_is_hidden(tmp_path: Path, first_step: int) -> None:
    """From the start on too, where it died before its first checkpoint."""
    for step, loss in ((None, 1.0), (first_step, 2.0)):
        tensorboard_logger, _ = run_loggers(tmp_path, first_step=step)
        for at in range(step or 0, 4 if step is None else 3):
            tensorboard_logger.log_metrics({"loss": loss}, at)
        tensorboard_logger.finalize("success")
    values = [(event.step, event.value) for event in read_events(tmp_path).Scalars("loss")]
    assert values == [(at, 1.0) for at in range(first_step)] + [(at, 2.0) for at in range(first_step, 3)]


def write(folder: Path, *calls: dict[str, Any], kept_rows: int = 0) -> None:
    """Log as Lightning does, which saves after each call but those of its learning rate monitor."""
    _, logger = run_loggers(folder, kept_rows=kept_rows)
    for call in calls:
        logger.log_metrics({name: value for name, value in call.items() if name != "step"}, step=call["step"])
        if "epoch" in call:
            logger.save()
    logger.finalize("success")


STEP = {"epoch": 0, "train/loss_step": 1.5, "step": 3}
VALIDATION = {"epoch": 0, "val/acc": 0.5, "step": 3}
NEXT = {"epoch": 1, "train/loss_step": 1.25, "step": 4}


def test_what_is_logged_of_a_step_is_one_row_and_a_learning_rate_alone_is_none(tmp_path: Path) -> None:
    """As of a run that ends in the middle of a step, before its loss is known."""
    rates = [{"lr-SGD": rate, "step": step} for step, rate in ((1, 0.2), (3, 0.1), (4, 0.05), (5, 0.01))]
    write(tmp_path, rates[0], {"mine": 7, "step": 2}, rates[1], STEP, VALIDATION, rates[2], NEXT, rates[3])
    assert logged(tmp_path) == [
        {"mine": "7", "step": "2"},
        {"epoch": "0", "lr-SGD": "0.1", "step": "3", "train/loss_step": "1.5", "val/acc": "0.5"},
        {"epoch": "1", "lr-SGD": "0.05", "step": "4", "train/loss_step": "1.25"},
    ]


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_a_resumed_run_fills_the_row_of_its_checkpoint(tmp_path: Path, killed_after: int) -> None:
    """The checkpoint was written after one row, before the validation of its step."""
    calls = [STEP, VALIDATION, NEXT]
    write(tmp_path / "whole", *calls)
    write(tmp_path / "run", *calls[:killed_after])
    write(tmp_path / "run", VALIDATION, NEXT, kept_rows=1)
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_every_row_of_a_run_has_its_step_its_epoch_and_more(tmp_path: Path) -> None:
    """With a schedule by epochs too, which Lightning's monitor would log at the beginning of each."""
    run = tmp_path / "run"
    flags = ["--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=1", "--trainer.max_epochs=2"]
    run_here("fit", *TINY, *flags, "--trainer.log_every_n_steps=2", f"--run_dir={run}")
    found = logged(run)
    # Of five steps an epoch, every second and the last.
    assert [int(row["step"]) for row in found] == [1, 3, 4, 5, 7, 9]
    assert [int(row["epoch"]) for row in found] == [0, 0, 0, 1, 1, 1]
    assert {"train/loss_step", "lr-NesterovSGD"} <= found[0].keys()
    assert {"train/loss", "val/acc", "train/loss_step", "lr-NesterovSGD"} <= found[-1].keys()
    assert {"train/loss", "val/acc"} <= found[2].keys()


def test_logs_are_the_same_at_fewer_log_points(tmp_path: Path) -> None:
    epochs, steps = [], []
    for every in (1, 2):
        run = tmp_path / str(every)
        run_here("fit", *TINY, f"--trainer.log_every_n_steps={every}", f"--run_dir={run}")
        found = logged(run)
        steps.append({int(row["step"]): row["train/loss_step"] for row in found if "train/loss_step" in row})
        epochs.append(found[-1]["train/loss"])
    assert [*steps[0]] == [0, 1, 2, 3, 4]
    assert steps[1] == {step: steps[0][step] for step in (1, 3)}
    assert epochs[0] == epochs[1] != ""


class Keeps(DummyLogger):
    """As MLflow's and W&B's: gets the settings of the run by themselves."""

    settings: ClassVar[list[Any]] = []

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.settings.append(params)


def test_one_validation_has_one_step_and_a_users_logger_gets_the_settings(tmp_path: Path) -> None:
    Keeps.settings.clear()
    flags = ["--trainer.max_epochs=2", "--data.batch_size=8", "--trainer.val_check_interval=6"]
    flags += ["--trainer.accumulate_grad_batches=2", "--figures.every_n_epochs=1"]
    flags += ["--trainer.logger=test_loggers.Keeps", "--trainer.logger.config={}"]
    run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}")
    events = read_events(tmp_path / "run")
    names = [name for name in events.Tags()["scalars"] if name.startswith("val/")]
    steps = {tuple(event.step for event in events.Scalars(name)) for name in names}
    steps |= {tuple(image.step for image in events.Images(name)) for name in events.Tags()["images"]}
    assert {"val/acc", "val/acc_rank0"} < {*names}
    assert len(steps) == 1, steps
    (settings,) = Keeps.settings
    assert settings["data"]["batch_size"] == 8
    assert settings["model"]["arch"] == "tiny"


class Refuses(DummyLogger):
    """As MLflow's of a store that it takes no more, with an error of its own, or of a server that is not there."""

    class Error(Exception):
        """No other package knows it."""

    def __init__(self, save_dir: str, *, late: bool) -> None:
        super().__init__()
        self._file = Path(save_dir, "log")
        if not late:
            self._refuse()

    def _refuse(self) -> None:
        self._file.parent.mkdir(parents=True)
        self._file.touch()
        raise self.Error("the store is\nold: " + "set ALLOW_IT=true or " * 40)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()


@pytest.mark.parametrize("late", ["false", "true"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_logger_that_cannot_be_used_ends_a_run_that_changes_nothing(late: str, resumes: bool, tmp_path: Path) -> None:
    run, resuming = tmp_path / "run", ["--resume=auto", "--trainer.max_epochs=2"] if resumes else []
    if resumes:
        run_here("fit", *TINY, f"--run_dir={run}")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    flags = [f"--run_dir={run}", *resuming, "--trainer.logger=test_loggers.Refuses"]
    flags += [f"--trainer.logger.late={late}", "--trainer.logger.save_dir=own"]
    refused("fit", *TINY, *flags, says=["Refuses cannot be used: the store is old: "])
    assert {path: path.read_bytes() for path in before} == before
    assert run.exists() == resumes
