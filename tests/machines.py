"""Two machines within this one: network namespaces with addresses of their own and a cable between them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[1]


@dataclass
class Machine:
    """A network namespace with one interface, `eth0`, and the loopback interface."""

    name: str
    address: str
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str | Path, log: Path, cwd: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Run `command` here with both streams in `log`; one thread per process, the tests' callbacks on the path."""
        paths = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}",
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *map(str, command)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **paths, **environment},
                cwd=cwd,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.running.append(process)
        return process

    def cut_off(self) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def listening(self) -> dict[int, set[str]]:
        """The addresses at which each process here listens, by its id."""
        found: dict[int, set[str]] = {}
        # Not psutil, which reads the tables of its own namespace.
        for line in _ip("netns", "exec", self.name, "ss", "-Hltnp").splitlines():
            address, owners = line.split()[3].rpartition(":")[0], re.findall(r"pid=(\d+)", line)
            for pid in map(int, owners):
                found.setdefault(pid, set()).add(address)
        return found

    def processes(self) -> list[psutil.Process]:
        """All that run here."""
        found = []
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def kill_all(self) -> None:
        """End everything here."""
        while processes := self.processes():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            for started in self.running:
                started.wait()
            psutil.wait_procs(processes, timeout=10)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Machines that reach each other; nothing of them is left, whatever happens."""
    names = [f"litcifar{os.getpid()}{letter}" for letter in "ab"]
    machines = [Machine(name, f"10.77.0.{number}") for number, name in enumerate(names, start=1)]
    made: list[Machine] = []
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
            made.append(machine)
        _ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for machine in machines:
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", machine.name, "link", "set", interface, "up")
        yield machines[0], machines[1]
    finally:
        for machine in made:
            machine.kill_all()
            _ip("netns", "delete", machine.name)


def why_not() -> str | None:
    """Why there can be no machines here; None if there can."""
    try:
        with two_machines():
            return None
    except FileNotFoundError:
        return "there is no `ip` command (package iproute2)"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed: {error.stderr.strip()}"


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
