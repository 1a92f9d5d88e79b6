"""Running the command line: in this process where one is enough, as a user does where processes start others."""

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.cli.main import main
from lit_cifar.launch.forked import EndedRun, run
from lit_cifar.tools.verify.runs import TRAINER

TINY = [
    *("--model.arch=tiny", "--model.stem=imagenet", "--figures.every_n_epochs=0"),
    *("--data.dataset=synthetic", "--data.num_train=96", "--data.num_test=100"),
    *("--data.val_size=16", "--data.batch_size=16", "--trainer.max_epochs=1"),
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=1"),
    "--trainer.precision=32-true",  # on every machine, whatever is fast there
]
TRANSFORMS = [
    "--data.augment.transforms+=torchvision.transforms.v2.TrivialAugmentWide",
    "--data.augment.transforms+=torchvision.transforms.v2.RandomErasing",
]
MIXED = ["--data.mixing.mixup=0.4", "--data.mixing.cutmix=1.0"]
MIXED += ["--data.balance.class_weights=[1,2,3,4,5,5,4,3,2,1]", "--data.balance.draw_equally=true"]
FIT: dict[str, Any] = {"module": "lit_cifar", "preload": TRAINER}  # arguments of `ForkedRun`


def run_here(*args: str | Path, check: bool = True) -> EndedRun:
    """`python -m lit_cifar *args` in this process; without `check` it may fail."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(arg) for arg in args])
        except SystemExit as stop:
            status = int(stop.code or 0)
    return _checked(EndedRun(status, out.getvalue(), err.getvalue(), 0.0), check)


def _checked(ended: EndedRun, check: bool) -> EndedRun:
    if ended.status is None or (check and ended.status):
        raise AssertionError(f"exit status {ended.status}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
    return ended


def refused(*args: str | Path, says: Iterable[str] = ()) -> str:
    """What is said of a command that cannot work, in few lines, by `run_here`: all of `says`, wherever it is broken."""
    result = run_here(*args, check=False)
    assert result.status == 2, result.stderr
    assert len([line for line in result.stderr.splitlines() if line.strip()]) <= 5, result.stderr
    assert "Traceback" not in result.stderr
    whole = " ".join(result.stderr.split())
    assert [words for words in says if words not in result.stderr and words not in whole] == [], result.stderr
    return result.stderr


def launch(*args: str | Path, timeout_s: float = 110, check: bool = True, ranks: int = 1) -> EndedRun:
    """`python -m lit_cifar *args` in a process of its own, with tests and notebooks on the path for their callbacks.

    One thread per process: the tests run more processes than there are cores. With `ranks` it runs in so many
    processes, as under torchrun; with one the strategy launches the others.
    """
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "notebooks")]
    paths = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    how = {"num_ranks": ranks, "limit_s": timeout_s, "variables": {"PYTHONPATH": paths}}
    with tempfile.TemporaryDirectory() as folder:
        return _checked(run([*map(str, args)], folder=Path(folder), **FIT, **how), check)


def counts(run: Path, split: str = "test") -> dict[str, tuple[int, int]]:
    """Correct and total of every rank in a run's `per_rank.csv`, and of `all`."""
    rows = [line.split(",") for line in (run / "per_rank.csv").read_text().splitlines()[1:]]
    return {rank: (int(correct), int(total)) for name, rank, correct, total, _ in rows if name == split}


def logged(run: Path) -> list[dict[str, str]]:
    """The rows of a run's `metrics.csv`, without their empty cells."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def losses(run: Path) -> list[float]:
    """The mean of every epoch."""
    return [float(row["train/loss"]) for row in logged(run) if "train/loss" in row]


def mode_flags(mode: str, devices: int = 2, **arguments: object) -> list[str]:
    """The flags of a mode, or of a strategy's class with its arguments; "single" is one device without any strategy."""
    if mode == "single":
        return ["--trainer.devices=1"]
    own = [f"--trainer.strategy.{name}={value}" for name, value in arguments.items()]
    return [f"--trainer.strategy={mode}", *own, f"--trainer.devices={devices}"]


def callback(name: str, **arguments: object) -> list[str]:
    """The flags that add a callback to a run."""
    own = [f"--trainer.callbacks.{argument}={value}" for argument, value in arguments.items()]
    return [f"--trainer.callbacks+={name}", *own]


def last_checkpoint(run: Path) -> dict[str, Any]:
    """What is in a run's `last.ckpt`."""
    return read_checkpoint(run / "checkpoints" / "last.ckpt")


def end_of(run: Path) -> tuple[str, str]:
    """The digest of the last weights, and which samples were used in which step."""
    return (run / "weights.sha256").read_text().splitlines()[-1], (run / "sample_audit.csv").read_text()


def graded(*quick: Any, slow: Iterable[Any] = (), exhaustive: Iterable[Any] = ()) -> list[Any]:
    """Parameters of a test, those that take long with their marks; a tuple is the values of several names."""
    return [
        pytest.param(*(values if isinstance(values, tuple) else (values,)), marks=marks)
        for part, marks in ((quick, ()), (slow, pytest.mark.slow), (exhaustive, pytest.mark.exhaustive))
        for values in part
    ]


def environment_of(run: Path) -> dict[str, object]:
    """A run's `environment.json`."""
    content: dict[str, object] = json.loads((run / "environment.json").read_text())
    return content


def own_network(name: str) -> list[str]:
    """`TINY` with a network of `own_networks`."""
    return [*(flag for flag in TINY if "--model" not in flag), f"--model.network=own_networks.{name}"]
