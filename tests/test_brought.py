"""Loggers, callbacks and profilers that people bring: docs/training.md says which work, and this file holds its table.

What observes a run changes no bit of it; what decides in it decides alike after a resume and on all processes. `fit`
refuses the others before the first step; `test_refusals` has their messages.
"""

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import TINY, callback, last_checkpoint, launch, mode_flags, refused, run_here
from documents import ROOT

from lit_cifar.checkpoint.files import weights_digest
from lit_cifar.cli.main import CLI
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.run_folder import RunLock

BASE = ["fit", *TINY, "--trainer.max_epochs=2", "--trainer.num_sanity_val_steps=0", "--last_checkpoint.every_n_steps=1"]


def logger(name: str, **arguments: object) -> list[str]:
    own = [f"--trainer.logger.{argument}={value}" for argument, value in arguments.items()]
    return [f"--trainer.logger={name}", *own]


def files(pattern: str, least: int = 1) -> Callable[[Path, str], bool]:
    """Whether so many files below the run's folder have such names."""
    return lambda run, said: len([*run.glob(pattern)]) >= least


def says(words: str) -> Callable[[Path, str], bool]:
    return lambda run, said: re.search(words, said) is not None


def logged(name: str) -> Callable[[Path, str], bool]:
    return lambda run, said: re.search(name, (run / "metrics.csv").read_text().splitlines()[0]) is not None


@dataclass(frozen=True)
class Brought:
    """What somebody adds to `fit`."""

    flags: list[str]
    leaves: Callable[[Path, str], bool]  # whether it has done its work, by the run's folder and what was printed
    needs: str | None = None  # a package that is no part of the installation
    stop_at: int = 7  # the step of ten, in two epochs, after which it is interrupted, and resumed
    decides: bool = False  # whether it may end the run, so that the weights are not those of a run without it


OBSERVERS: dict[str, Brought] = {
    "WandbLogger": Brought(
        logger("WandbLogger", offline="true", save_dir="", project="cifar"), files("wandb/offline-run-*"), "wandb"
    ),
    "MLFlowLogger": Brought(
        logger("MLFlowLogger", tracking_uri="sqlite:///RUN.db", experiment_name="cifar"),
        lambda run, said: run.with_suffix(".db").exists(),
        "mlflow",
    ),
    "CSVLogger": Brought(logger("CSVLogger", save_dir="theirs"), files("theirs/**/metrics.csv")),
    "TensorBoardLogger": Brought(logger("TensorBoardLogger", save_dir="theirs"), files("theirs/**/events*")),
    "ModelCheckpoint": Brought(
        [
            *callback("ModelCheckpoint", monitor="val/acc", mode="max", save_top_k=2),
            *callback("ModelCheckpoint", save_top_k=-1, every_n_train_steps=4, dirpath="RUN/four"),
        ],
        lambda run, said: (
            files("checkpoints/ModelCheckpoint/*.ckpt", 2)(run, said) and files("four/*.ckpt", 2)(run, said)
        ),
    ),
    "ModelSummary": Brought(callback("ModelSummary", max_depth=3), says(r"layer1\.0 ")),
    "RichModelSummary": Brought(callback("RichModelSummary", max_depth=3), says(r"layer1\.0 ")),
    "LearningRateMonitor": Brought(
        callback("LearningRateMonitor", logging_interval="step", log_momentum="true"), logged("momentum")
    ),
    "DeviceStatsMonitor": Brought(callback("DeviceStatsMonitor", cpu_stats="true"), logged("cpu_percent"), "psutil"),
    "simple": Brought(["--trainer.profiler=simple"], says("Mean duration")),
    "advanced": Brought(["--trainer.profiler=advanced"], says("function calls")),
    "pytorch": Brought(["--trainer.profiler=pytorch"], says("CPU total|Self CPU")),
}
# It waits for a loss that is smaller by 10 for one epoch, and so ends the run of four after the second.
EARLY = callback("EarlyStopping", monitor="val/loss", min_delta=10, patience=1)
DECIDERS = {"EarlyStopping": Brought([*EARLY, "--trainer.max_epochs=4"], logged("val/loss"), decides=True)}
BROUGHT = OBSERVERS | DECIDERS


def fit(run: Path, flags: list[str], *more: str, status: int = 0) -> str:
    """What was printed."""
    own = [flag.replace("RUN", str(run)) for flag in flags]
    result = launch(*BASE, *mode_flags("ddp"), *own, f"--run_dir={run}", *more, check=False, timeout_s=300)
    assert result.status == status, result.stderr[-3000:]
    return result.stdout + result.stderr


def digest(run: Path) -> str:
    return weights_digest(last_checkpoint(run)["state_dict"])


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run to which nothing was added."""
    run = tmp_path_factory.mktemp("without") / "run"
    fit(run, [])
    return digest(run)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BROUGHT)
def test_what_people_bring_works_and_goes_on_after_a_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, installed: Callable[[str], Path]
) -> None:
    """On two processes, which is harder than on one."""
    brought, run = BROUGHT[name], tmp_path / "run"
    if brought.needs:
        monkeypatch.setenv("PYTHONPATH", str(installed(brought.needs)), prepend=os.pathsep)
    for variable in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(variable, "true")
    monkeypatch.chdir(tmp_path)
    flags = brought.flags
    fit(run, flags, "--resume=auto", *callback("stopping.SignalAfter", step=brought.stop_at), status=143)
    said = fit(run, flags, "--resume=auto")
    assert brought.leaves(run, said), said[-2000:]
    if brought.decides:
        fit(tmp_path / "whole", flags)
        assert last_checkpoint(run)["global_step"] == last_checkpoint(tmp_path / "whole")["global_step"] == 10
        assert digest(run) == digest(tmp_path / "whole")
    else:
        assert digest(run) == without


def test_the_page_has_what_is_tested() -> None:
    section = (ROOT / "docs" / "training.md").read_text().split("## Loggers, callbacks and profilers\n")[1]
    rows = re.findall(r"^\| (?:loggers|callbacks|profilers) \| (.*) \|$", section, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(BROUGHT)


@pytest.mark.parametrize("name", ["EarlyStopping", "ModelCheckpoint"])
def test_a_decision_on_the_part_of_one_process_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    for monitor, mode in {"train/loss_step": "min", "train/acc_step": "max"}.items():
        flags = [*BASE, *callback(name, monitor=monitor, mode=mode)]
        run_here(*flags)
        said = refused(*flags, *mode_flags("ddp"), says=["own part of the batch"])
        assert f"--trainer.callbacks.monitor={monitor.removesuffix('_step')}" in said


def test_a_ranking_that_a_resumed_run_could_not_repeat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would leave out the checkpoints between the resume and the next validation."""
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    ranked = callback("ModelCheckpoint", monitor="val/acc", mode="max")
    for often in ("every_n_train_steps=3", "train_time_interval=00:01:00"):
        refused(*BASE, *ranked, f"--trainer.callbacks.{often}", says=["unknown to", "leave out the monitor"])
    by_step = callback("ModelCheckpoint", monitor="train/loss_step", every_n_train_steps=3)
    refused(*BASE, *by_step, "--trainer.log_every_n_steps=2", says=["of logged steps alone"])
    own = ["--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau", "--model.lr_scheduler.monitor=own/error"]
    own += callback("stopping.SlowSteps", seconds=0)  # which may log it
    newest = callback("ModelCheckpoint", monitor="step", mode="max", save_top_k=3, every_n_train_steps=3)
    for works in (ranked, by_step, own, newest):
        run_here(*BASE, *works)


def test_links_of_wandb_do_not_hinder_a_resume_and_others_do(tmp_path: Path) -> None:
    for folder, allowed in (("wandb", True), ("theirs", False), ("theirs/wandb", False)):
        run = tmp_path / folder.replace("/", "-")
        (run / folder).mkdir(parents=True)
        (run / folder / "debug.log").symlink_to(tmp_path / "elsewhere")
        expected = nullcontext() if allowed else pytest.raises(ConfigError, match="outside of the run folder")
        with expected:
            RunLock().take(run)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "wandb").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="outside of the run folder"):
        RunLock().take(tmp_path / "linked")
