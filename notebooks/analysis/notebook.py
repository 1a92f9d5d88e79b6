"""Runs `python -m lit_cifar` from a notebook, in processes of their own, and shows its progress.

`ddp` and other modes start further processes. A notebook's own process cannot do that, least of all after it has used
a GPU. A new process can, so every mode works. Processes are forked from one that has imported torch and Lightning,
which takes longer than a short training, or are started by torchrun as a user starts them.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import psutil

from lit_cifar.launch.forked import ForkedRun
from lit_cifar.mode.table import MODES
from lit_cifar.strategies import PipelineStrategy
from lit_cifar.tools.verify.runs import TRAINER

_SHOW_EVERY_S = 0.5
_COLOURS = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")  # Jupyter sets them; the codes would stand in the output
_SAVING_S = 60.0  # seconds in which an interrupted run must have saved
# Modes with a process for each device, or the class that takes their options; "ddp_spawn" starts processes by itself.
_A_PROCESS_EACH = {row.name for row in MODES if row.processes == "N"} - {"ddp_spawn"} | {PipelineStrategy.__name__}


class Run:
    """A command that has been started.

    Attributes:
        process: That of the command; with `torchrun`, torchrun's own.
    """

    def __init__(self, command: Sequence[str], *, title: str, environment: Mapping[str, str]) -> None:
        self._title = title
        self._started_at = perf_counter()
        self._output = ""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the command has ended
        self.process = subprocess.Popen(command, env=environment, stdout=self._file, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        """What the command has printed so far, standard output and standard error in the order in which they came."""
        if not self._file.closed:
            self._output = os.pread(self._file.fileno(), 1 << 24, 0).decode(errors="replace")
        return self._output

    def wait(self) -> "Run":
        """Wait for the end, and show the latest line meanwhile. If the cell is interrupted, the run saves and stops.

        Raises:
            RuntimeError: The command failed; the text ends with the last lines that it printed.
        """
        status_line = _StatusLine(self._title)
        try:
            while not self._has_ended():
                status_line.show(_last_line(self.output))
        except KeyboardInterrupt:
            self.process.terminate()
            self.process.wait()
            raise
        finally:
            output = self.output
            self._file.close()
        status = self.process.returncode
        seconds = perf_counter() - self._started_at
        status_line.show(f"{f'exit status {status}' if status else 'done'} after {seconds:.0f} s", last=True)
        if status:
            raise RuntimeError(f"{self._title}: exit status {status}\n{output[-3000:]}")
        return self

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank that torchrun has started, e.g. to end it: `run.rank(1).kill()`.

        Raises:
            RuntimeError: There is none, as torchrun has not started it yet or has ended.
        """
        with suppress(psutil.Error):  # a process may end while it is looked at
            for process in psutil.Process(self.process.pid).children():
                if process.environ().get("RANK") == str(number):
                    return process
        raise RuntimeError(f"{self._title}: no process of rank {number}\n{self.output[-3000:]}")

    def _has_ended(self) -> bool:
        try:
            self.process.wait(timeout=_SHOW_EVERY_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def start(
    command: str, *options: str | Path, torchrun: Sequence[str], env: Mapping[str, str] = MappingProxyType({})
) -> Run:
    """Start `torchrun TORCHRUN -m lit_cifar COMMAND OPTIONS` and return at once.

    Args:
        command: "fit", "test", "verify", ...
        options: As on the command line.
        torchrun: Options of torchrun, e.g. ["--nproc_per_node=2"].
        env: Environment variables to set.
    """
    return Run(
        [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "lit_cifar", command, *map(str, options)],
        title=f"torchrun lit_cifar {command}",
        environment=_environment(env),
    )


def run(command: str, *options: str | Path, env: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run `python -m lit_cifar COMMAND OPTIONS` to its end, and return what it has printed.

    Raises:
        RuntimeError: The command failed; the text ends with the last lines that it printed.
    """
    return run_all([[command, *options]], env=env)[0]


def run_all(
    commands: Sequence[Sequence[str | Path]],
    *,
    at_once: int = 1,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] = MappingProxyType({}),
) -> list[str]:
    """Run many commands in their order, and show how many are done. If one fails, those beside it are ended.

    Args:
        commands: Each as the positional arguments of `run`.
        at_once: How many at a time. Runs whose speed is measured go one by one.
        env: Environment variables to set: for all commands, or a list with those of each.

    Returns:
        What each has printed, standard output and standard error in the order in which they came.

    Raises:
        RuntimeError: A command failed; the text ends with the last lines that it printed.
    """
    names = ", ".join(dict.fromkeys(str(command[0]) for command in commands))
    status_line, started_at = _StatusLine(f"lit_cifar {names}"), perf_counter()
    envs = [env] * len(commands) if isinstance(env, Mapping) else env
    pairs = list(zip(commands, envs, strict=True))
    outputs: list[str] = []
    for first in range(0, len(commands), at_once):
        together = [_Forked(*pair) for pair in pairs[first : first + at_once]]
        try:
            outputs += [one.wait(status_line, f"{first} of {len(commands)} runs done") for one in together]
        except KeyboardInterrupt:
            for one in together:
                one.save_and_stop()
            raise
        finally:
            for one in together:
                one.kill()  # does nothing to those that have ended
    number = "1 run" if len(commands) == 1 else f"{len(commands)} runs"
    status_line.show(f"{number} done after {perf_counter() - started_at:.0f} s", last=True)
    return outputs


class _Forked:
    """A command of ours in forked processes."""

    def __init__(self, words: Sequence[str | Path], env: Mapping[str, str]) -> None:
        self._words = list(map(str, words))
        self._folder = tempfile.TemporaryDirectory()
        self._printed = Path(self._folder.name) / "printed"
        num_ranks = num_processes(self._words)
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        self._run = ForkedRun(
            self._words,
            module="lit_cifar",
            environment={"OMP_NUM_THREADS": str(threads)} | _environment(env),
            stdout=self._printed,
            stderr=self._printed,
            num_ranks=num_ranks,
            preload=TRAINER,
        )

    def wait(self, status_line: "_StatusLine", text: str) -> str:
        """Wait for the end, and show `text` and the latest line meanwhile; what the command has printed.

        Raises:
            RuntimeError: The command failed.
        """
        while (status := self._run.wait(_SHOW_EVERY_S)) is None:
            status_line.show(f"{text}; {_last_line(self._output())}")
        if status:
            raise RuntimeError(f"lit_cifar {self._words[0]}: exit status {status}\n{self._output()[-3000:]}")
        return self._output()

    def save_and_stop(self) -> None:
        """End the command as a scheduler does: it saves first."""
        for pid in self._run.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._run.wait(_SAVING_S)

    def kill(self) -> None:
        self._run.kill()
        self._folder.cleanup()

    def _output(self) -> str:
        return self._printed.read_text(errors="replace") if self._printed.exists() else ""


def num_processes(words: Sequence[str]) -> int:
    """How many processes to fork for a command. With one, the mode starts the others."""
    given = dict(word.partition("=")[::2] for word in words)
    devices = given.get("--trainer.devices", "")
    return int(devices) if given.get("--trainer.strategy") in _A_PROCESS_EACH and devices.isdecimal() else 1


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2].strip()


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _COLOURS} | dict(env)


class _StatusLine:
    """A line below the cell, replaced by each new one; without a notebook only the last one is printed."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._display: Any = None

    def show(self, text: str, *, last: bool = False) -> None:
        """Replace the line."""
        line = f"{self._title}: {text or 'starting'}"
        if not _in_notebook():
            if last:
                print(line)
            return
        from IPython.display import display

        if self._display is None:
            self._display = display({"text/plain": line}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._display.update({"text/plain": line}, raw=True)


def _in_notebook() -> bool:
    """Whether a kernel runs this code; its modules may have been imported without one."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
