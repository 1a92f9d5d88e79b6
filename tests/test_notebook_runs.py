"""Starting runs from a notebook."""

import os
import re
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock, call

import nbformat
import pytest
from commands import TINY
from nbclient import NotebookClient

from analysis import notebook


def test_a_run_returns_what_the_command_printed(capfd: pytest.CaptureFixture[str]) -> None:
    import_module("ipykernel")  # as another test may have done: that makes no notebook
    done = notebook.run("modes")
    assert done.process.returncode == 0
    assert "ddp_spawn" in done.output
    assert capfd.readouterr().out.startswith("lit_cifar modes: done after ")


def test_a_run_that_fails_raises_with_its_last_lines() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)lit_cifar fit: exit status 2\n.*--model.arch"):
        notebook.run("fit", "--model.arch=resnet35")


def test_an_interrupted_cell_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = notebook.start("fit", *TINY, "--trainer.max_epochs=1000", f"--run_dir={tmp_path}")

    def interrupt(self: notebook.Run) -> bool:
        while not (tmp_path / "metrics.csv").exists() and self.process.poll() is None:
            time.sleep(0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(notebook.Run, "_has_ended", interrupt)
    with pytest.raises(KeyboardInterrupt):
        started.wait()
    assert started.process.returncode == 128 + signal.SIGTERM, started.output


@pytest.fixture
def short_commands(monkeypatch: pytest.MonkeyPatch) -> list[notebook.Run]:
    """What is started: a command of Python's own in the place of ours, which imports for seconds."""
    started: list[notebook.Run] = []
    code = {"modes": "pass", "fit": "import time; time.sleep(60)", "fail": "raise SystemExit('--model.arch')"}

    def start(command: str, **kwargs: object) -> notebook.Run:
        words = [sys.executable, "-c", code[command]]
        started.append(notebook.Run(words, title=f"lit_cifar {command}", environment=os.environ))
        return started[-1]

    monkeypatch.setattr(notebook, "start", start)
    return started


@pytest.mark.usefixtures("short_commands")
def test_many_runs_show_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    notebook.run_all([["modes"], ["modes"], ["modes"]], at_once=2)
    assert re.fullmatch(r"lit_cifar: 3 runs done after \d+ s\n", capfd.readouterr().out)


def test_a_run_that_fails_ends_those_beside_it(short_commands: list[notebook.Run]) -> None:
    with pytest.raises(RuntimeError, match=r"exit status 1\n(?s:.*)--model.arch"):
        notebook.run_all([["fail"], ["fit"], ["modes"]], at_once=2)
    assert len(short_commands) == 2
    assert short_commands[1].process.returncode == -signal.SIGTERM, "it was ended"


def test_each_command_may_have_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Mock()
    monkeypatch.setattr(notebook, "start", started)
    notebook.run_all([["fit"], ["test"]], env=[{"OMP_NUM_THREADS": "1"}, {}])
    assert started.mock_calls[0] == call("fit", env={"OMP_NUM_THREADS": "1"})
    assert call("test", env={}) in started.mock_calls


def test_torchrun_starts_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "Run", lambda command, **_: command)
    assert notebook.start("fit", "--a=1", torchrun=["--nproc_per_node=2"]) == [
        *[sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "lit_cifar", "fit", "--a=1"]
    ]


@pytest.mark.timeout(60)
def test_a_rank_is_found_below_torchrun_and_can_be_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    run = notebook.Run(command, title="torchrun sleep.py", environment=os.environ)
    while True:
        with suppress(RuntimeError):  # not started yet
            rank = run.rank(1)
            break
        time.sleep(0.1)
    assert str(script) in rank.cmdline()
    assert rank.environ()["RANK"] == "1"
    rank.kill()
    with pytest.raises(RuntimeError, match=r"torchrun sleep\.py: exit status 1"):
        run.wait()
    with pytest.raises(RuntimeError, match="no process of rank 1"):
        run.rank(1)


def test_a_notebook_shows_one_line_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(notebook.__file__).parents[1]))  # as the notebooks' own folder
    cell = nbformat.v4.new_code_cell("from analysis import notebook\nstarted = notebook.run('modes')")
    book = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(book, timeout=100, kernel_name="python3").execute()
    (output,) = book.cells[0]["outputs"]
    assert output["data"]["text/plain"].startswith("lit_cifar modes: done after ")
