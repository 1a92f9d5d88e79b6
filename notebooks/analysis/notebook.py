"""Runs `python -m lit_cifar` from a notebook, in a process of its own, and shows its progress.

`ddp` and other modes start further processes. A notebook's own process cannot do that, least of all after it has used
a GPU. A new process can, so every mode works.
"""

import os
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

_SHOW_EVERY_S = 0.5
_COLOURS = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")  # Jupyter sets them; the codes would stand in the output


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

    def wait(self, *, check: bool = True, show: bool = True) -> "Run":
        """Wait for the end, and `show` the latest line meanwhile. If the cell is interrupted, the run saves and stops.

        Raises:
            RuntimeError: `check` and the command failed; the text ends with the last lines that it printed.
        """
        status_line = _StatusLine(self._title) if show else None
        try:
            while not self._has_ended():
                if status_line:
                    status_line.show(self.output.rstrip().rpartition("\n")[2].strip())
        except KeyboardInterrupt:
            self.process.terminate()
            self.process.wait()
            raise
        finally:
            output = self.output
            self._file.close()
        status = self.process.returncode
        seconds = perf_counter() - self._started_at
        if status_line:
            status_line.show(f"{f'exit status {status}' if status else 'done'} after {seconds:.0f} s", last=True)
        if check and status:
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
    command: str, *options: str | Path, torchrun: Sequence[str] = (), env: Mapping[str, str] = MappingProxyType({})
) -> Run:
    """Start `python -m lit_cifar COMMAND OPTIONS` and return at once.

    Args:
        command: "fit", "test", "verify", ...
        options: As on the command line.
        torchrun: Options of torchrun, e.g. ["--nproc_per_node=2"]: torchrun starts the processes.
        env: Environment variables to set.
    """
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    return Run(
        [sys.executable, *launcher, "-m", "lit_cifar", command, *map(str, options)],
        title=f"{'torchrun ' if torchrun else ''}lit_cifar {command}",
        environment={name: value for name, value in os.environ.items() if name not in _COLOURS} | dict(env),
    )


def run(
    command: str, *options: str | Path, torchrun: Sequence[str] = (), env: Mapping[str, str] = MappingProxyType({})
) -> Run:
    """Run `python -m lit_cifar COMMAND OPTIONS` to its end; the arguments are those of `start`.

    Raises:
        RuntimeError: The command failed; the text ends with the last lines that it printed.
    """
    return start(command, *options, torchrun=torchrun, env=env).wait()


def run_all(
    commands: Sequence[Sequence[str]],
    *,
    at_once: int = 1,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] = MappingProxyType({}),
) -> None:
    """Run many commands in their order, and show how many are done. If one fails, those beside it are ended.

    Args:
        commands: Each as the positional arguments of `start`.
        at_once: How many at a time. Runs whose speed is measured go one by one.
        env: Environment variables to set: for all commands, or a list with those of each.

    Raises:
        RuntimeError: A command failed; the text ends with the last lines that it printed.
    """
    status_line, started_at = _StatusLine("lit_cifar"), perf_counter()
    envs = [env] * len(commands) if isinstance(env, Mapping) else env
    pairs = list(zip(commands, envs, strict=True))
    for first in range(0, len(commands), at_once):
        status_line.show(f"{first} of {len(commands)} runs done")
        together = [start(*command, env=own) for command, own in pairs[first : first + at_once]]
        try:
            for one in together:
                one.wait(show=False)
        finally:
            for one in together:
                one.process.terminate()  # does nothing to those that have ended
            for one in together:
                one.wait(check=False, show=False)
    status_line.show(f"{len(commands)} runs done after {perf_counter() - started_at:.0f} s", last=True)


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
