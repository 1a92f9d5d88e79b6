"""A SLURM cluster of two nodes, which are the two machines of `machines`; Debian's packages slurm-wlm and munge."""

import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from machines import REPOSITORY, Machine
from machines import why_not as why_no_machines
from processes import wait_until

NODES = "node1", "node2"
_PROGRAMS = "slurmctld", "slurmd", "munged", "sbatch", "srun"


def why_not() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if missing := [name for name in _PROGRAMS if _found(name) is None]:
        return f"SLURM is not installed: no {', '.join(missing)} (packages slurm-wlm and munge)"
    if os.geteuid():
        return "SLURM's daemons must be started as root"
    return why_no_machines()


class Cluster:
    """Two idle nodes. Its files lie in `folder`. The first node has the controller, and is where commands run."""

    def __init__(self, folder: Path, machines: tuple[Machine, Machine]) -> None:
        self._folder, self.machines = folder, machines
        key, socket = folder / "munge.key", folder / "munge.socket"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for name in NODES:
            (folder / name).mkdir()
        known = {"localhost": "127.0.0.1", **{NODES[number]: each.address for number, each in enumerate(machines)}}
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # asked for, not used
        (folder / "slurm.conf").write_text(_configuration(folder, machines))
        names = [f"--{name}={folder / name}" for name in ("log-file", "pid-file", "seed-file")]
        self._start("munge", 0, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *names)
        assert wait_until(socket.exists, limit_s=60, poll_s=0.5), "munged does not start"
        self._start("slurmctld", 0, "slurmctld", "-D")
        for number, node in enumerate(NODES):
            self._start(node, number, "slurmd", "-D", "-N", node)
        are_idle = wait_until(lambda: self.num_idle() == len(NODES), limit_s=60, poll_s=0.5)
        assert are_idle, f"no two nodes\n{self.logs()}"

    def num_idle(self) -> int:
        """Number of nodes that wait for jobs."""
        return int(self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() or 0)

    def _start(self, name: str, number: int, program: str, *words: str) -> None:
        """Start a daemon on a machine that goes by its node's name, with the cluster's table of hosts."""
        hosts = f"hostname {NODES[number]} && mount --bind {self._folder / 'hosts'} /etc/hosts"
        command = ["unshare", "--uts", "--mount", "sh", "-c", f'{hosts} && exec "$@"', "sh", _found(program), *words]
        log = self._folder / f"{name}.log"
        self.machines[number].start(*command, log=log, cwd=self._folder, **self._variables())

    def _variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def start(self, *words: str | Path, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on the first node, in the checkout."""
        return self.machines[0].start(*words, log=log, cwd=REPOSITORY, **self._variables(), **environment)

    def run(self, *words: str | Path, **environment: str) -> str:
        """What a command says there."""
        log = self._folder / "said"
        status = self.start(*words, log=log, **environment).wait(60)
        assert status == 0, f"{words}: {log.read_text()}\n{self.logs()}"
        return log.read_text()

    def state(self, job: str) -> str:
        """A job's state, such as PENDING or COMPLETED."""
        return re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))[1]

    def logs(self) -> str:
        return "\n".join(f"{path.name}\n{path.read_text()[-1500:]}" for path in self._folder.glob("*.log"))


def _configuration(folder: Path, machines: tuple[Machine, Machine]) -> str:
    nodes = [
        f"NodeName={name} NodeAddr={machine.address} NodeHostname={name} CPUs=2 RealMemory=100"
        for name, machine in zip(NODES, machines, strict=True)
    ]
    lines = [
        "ClusterName=lit-cifar",
        f"SlurmctldHost={NODES[0]}({machines[0].address})",
        "SlurmUser=root",
        f"AuthInfo=socket={folder / 'munge.socket'},cred_expire=5",  # by which a requeued job waits
        "ProctrackType=proctrack/linuxproc",  # control groups belong to systemd
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmdTimeout=10",
        f"StateSaveLocation={folder}",
        f"SlurmdSpoolDir={folder}/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/%n.pid",
        *nodes,
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
