"""Trainings over two machines, by the script of configs/cluster; one loses the other.

The machines are network namespaces within this one, with addresses of their own and a cable between them.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from commands import TINY, callback
from processes import wait_until
from recorder import global_steps, has_reached

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
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **paths, **environment}
        words = ["ip", "netns", "exec", self.name, *map(str, command)]
        with log.open("wb") as out:
            process = subprocess.Popen(words, env=variables, cwd=cwd, stdout=out, stderr=subprocess.STDOUT)
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


SLOW = callback("stopping.SlowSteps", seconds=0.3)
NUM_TRAIN, BATCH_SIZE = 80, 16  # of TINY
EPOCHS = 3  # of the run that loses a machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TORCHRUN = REPOSITORY / "configs" / "cluster" / "torchrun.sh"


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    if reason := why_not():
        pytest.skip(reason)
    with two_machines() as pair:
        yield pair


def start(machines: tuple[Machine, Machine], folder: Path, *args: str, **settings: str) -> None:
    """`torchrun.sh TINY args` on each machine, as a person would; `settings` are the script's variables."""
    (folder / "ids").mkdir()
    record = callback("recorder.RecordIds", folder=folder / "ids")
    settings = {"RDZV_HOST": machines[0].address, "INTERFACE": "eth0", **settings}
    for machine in machines:
        own = folder / machine.name
        own.mkdir()
        machine.start(TORCHRUN, *TINY, *record, *args, log=own / "log", cwd=own, **settings)


def wait_for(folder: Path, *, step: int) -> None:
    got_on = wait_until(lambda: has_reached(folder / "ids", step), limit_s=90, poll_s=0.2)
    assert got_on, "the run does not get ahead:\n" + logs(folder)


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in folder.glob("*/log"))


def listening(machine: Machine) -> dict[str, set[str]]:
    """The addresses at which torchrun and the processes that it started listen."""
    found: dict[str, set[str]] = {"torchrun": set(), "training": set()}
    for pid, addresses in machine.listening().items():
        found["torchrun" if is_torchrun(psutil.Process(pid).cmdline()) else "training"] |= addresses
    return found


def is_torchrun(words: list[str]) -> bool:
    """Whether a command line is that of torchrun, not of a process that it started."""
    return any(word.endswith("/torchrun") for word in words)


@pytest.mark.parametrize(("mode", "processes", "readers"), [("ddp", 1, 1), ("ddp_pp", 2, 2)])
def test_over_both(mode: str, processes: int, readers: int, machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    start(machines, tmp_path, f"--trainer.strategy={mode}", *SLOW, NPROC=str(processes))
    wait_for(tmp_path, step=1)
    sockets = [listening(machine) for machine in machines]
    for machine in machines:
        status = machine.running[-1].wait(90)
        assert status == 0, logs(tmp_path)
    steps = global_steps(tmp_path / "ids")
    assert [step for _, step, _ in steps] == list(range(NUM_TRAIN // BATCH_SIZE))
    for _, _, ids in steps:
        counts = Counter(ids)
        assert len(counts) == BATCH_SIZE
        assert set(counts.values()) == {readers}  # the processes of a pipeline read the same samples
    for machine, found in zip(machines, sockets, strict=True):
        assert found["training"] == {machine.address}
    # torchrun's own port on the machine that keeps the rendezvous: docs/several-machines.md says how to shield it.
    assert [found["torchrun"] for found in sockets] == [{"*"}, set()]


def test_the_rest_goes_on_when_a_machine_is_lost(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    stays, leaves = machines
    flags = ["--trainer.strategy=ddp", f"--trainer.max_epochs={EPOCHS}", "--watchdog.timeout_s=8", *SLOW]
    flags += ["--resume=auto", f"--run_dir={tmp_path / 'run'}", "--last_checkpoint.every_n_steps=2"]
    start(machines, tmp_path, *flags, NNODES="1:2", NPROC="1", LAST_CALL_S="8", DEAD_AFTER_S="6")
    wait_for(tmp_path, step=7)
    leaves.cut_off()
    assert stays.running[-1].wait(150) == 0, logs(tmp_path)
    records = [json.loads(line) for line in (tmp_path / "ids" / "rank0.jsonl").read_text().splitlines()]
    sizes = [len(record["ids"]) for record in records]
    alone = [record for record in records if len(set(record["ids"])) == BATCH_SIZE]
    assert sizes == [BATCH_SIZE // 2] * (len(records) - len(alone)) + [BATCH_SIZE] * len(alone)
    num_steps = EPOCHS * (NUM_TRAIN // BATCH_SIZE)
    assert [record["step"] for record in alone] == list(range(num_steps - len(alone), num_steps))
    assert len(records) - len(alone) > alone[0]["step"] > 0  # it went on, and did not begin again
    # torchrun itself waits for TCP to give up; what it started does not.
    assert all(is_torchrun(process.cmdline()) for process in leaves.processes())
