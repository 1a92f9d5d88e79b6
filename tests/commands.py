"""Running the command line: in this process where one is enough, as a user does where processes start others."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lit_cifar.cli import main

TINY = [
    "--model.arch=resnet10",
    "--model.stem=imagenet",
    "--data.dataset=synthetic",
    "--data.num_train=96",
    "--data.num_test=100",
    "--data.val_size=16",
    "--data.batch_size=16",
    "--trainer.max_epochs=1",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.log_every_n_steps=1",
]


@dataclass(frozen=True)
class Result:
    """What a command left: exit status and its two streams."""

    status: int
    stdout: str
    stderr: str


def run_here(*args: str | Path) -> Result:
    """`python -m lit_cifar *args` in this process."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(arg) for arg in args])
        except SystemExit as stop:
            status = int(stop.code or 0)
    return Result(status, out.getvalue(), err.getvalue())


def launch(*args: str | Path, timeout_s: float = 110, check: bool = True) -> Result:
    """`python -m lit_cifar *args` in a process of its own, with this folder on the path for the tests' callbacks.

    One thread per process: the tests run more processes than there are cores.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-m", "lit_cifar", *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return Result(done.returncode, done.stdout, done.stderr)


def run_in_one_start(commands: list[list[str]], *, num_processes: int, folder: Path) -> None:
    """Every command after the other, in processes that torchrun starts once: that costs more than a tiny training."""
    file = folder / f"commands{num_processes}.json"
    file.write_text(json.dumps(commands))
    program = Path(__file__).with_name("run_commands.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    done = subprocess.run(
        [*torchrun, str(program), str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]


def counts(run: Path, split: str = "test") -> dict[str, tuple[int, int]]:
    """Correct and total of every rank in a run's `per_rank.csv`, and of `all`."""
    rows = [line.split(",") for line in (run / "per_rank.csv").read_text().splitlines()[1:]]
    return {rank: (int(correct), int(total)) for name, rank, correct, total, _ in rows if name == split}


def mode_flags(mode: str, devices: int = 2) -> list[str]:
    """The flags of a mode; "single" is one device without any strategy."""
    if mode == "single":
        return ["--trainer.devices=1"]
    return [f"--trainer.strategy={mode}", f"--trainer.devices={devices}"]


def environment_of(run: Path) -> dict[str, object]:
    """A run's `environment.json`."""
    content: dict[str, object] = json.loads((run / "environment.json").read_text())
    return content
