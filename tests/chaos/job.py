"""A training of several processes that can be started, observed and killed."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from processes import is_running

from chaos.progress import LAUNCH

_PATHS = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]


@dataclass
class Job:
    """`fit` under torchrun, which starts killed ranks again, or Lightning's launcher. `with` leaves nothing of it.

    The processes are found by their `--run_dir`, `folder/run`; they print to `folder/log.txt`.
    """

    folder: Path
    under_torchrun: bool
    launches: int = 0
    _launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Job":
        (self.folder / "steps").mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        """End every process of the job, stopped and orphaned ones as well."""
        while found := self._processes():
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=5)
        if self._launcher is not None:
            self._launcher.wait()

    def start(self, flags: Sequence[str], *, num_ranks: int) -> None:
        """Start the launcher, which must not be running."""
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=99", "-m"]
        words = [*(torchrun if self.under_torchrun else []), "lit_cifar", "fit", *flags, self._run_dir]
        words += ["--trainer.callbacks+=chaos.progress.StepLog", f"--trainer.callbacks.folder={self.folder}/steps"]
        self.launches += 1
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_PATHS), LAUNCH: str(self.launches)}
        with (self.folder / "log.txt").open("ab") as log:
            command = [sys.executable, "-m", *words]
            self._launcher = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)

    @property
    def status(self) -> int | None:
        """Exit status of the launcher; None while it runs."""
        assert self._launcher is not None
        return self._launcher.poll()

    def terminate(self) -> None:
        """Ask the launcher to end, which passes SIGTERM on to every rank, and wait until it has."""
        assert self._launcher is not None
        self._launcher.terminate()
        self._launcher.wait(60)

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in self._processes():
            with suppress(psutil.Error):  # the process is gone
                environment = process.environ()
                if "torch.distributed.run" not in process.cmdline():
                    found[int(environment.get("RANK", environment.get("LOCAL_RANK", 0)))] = process
        return found

    def last_words(self) -> str:
        return " | ".join((self.folder / "log.txt").read_text(errors="replace").splitlines()[-5:])

    @property
    def _run_dir(self) -> str:
        return f"--run_dir={self.folder / 'run'}"

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # the process is gone, or not ours
                if self._run_dir in process.cmdline() and is_running(process):
                    found.append(process)
        return found
