"""No sample is lost or used twice, and the end is that of an undisturbed run: `analysis.interrupted_runs` compares."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pandas as pd
import psutil
import pytest
from commands import callback, graded, mode_flags
from documents import ROOT
from processes import marked, wait_until

from analysis.interrupted_runs import largest_difference, metrics_without_clock

EVERY_N_STEPS = 4  # optimizer steps between saves
SPACING = 12  # optimizer steps between faults, more than are repeated after one
LIMIT_S = 200.0  # longest wait for what a job is expected to do
# Sent to one rank; "resize" stops the whole job and starts it with the next number of processes.
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
# Steps that may be repeated: none by a job that was asked to stop, because it saves first. Training continues while a
# checkpoint is being written, at most until the next one is due; and one step was begun.
MOST_REPEATED = {"kill": 2 * EVERY_N_STEPS + 1, "stop": 2 * EVERY_N_STEPS + 1, "term": 0, "resize": 0}
# A small training. The last batch of an epoch has 20 images, which divide among two replicas of two microbatches.
SMALL = [
    *("--model.arch=resnet10", "--model.stem=imagenet", "--model.optimizer.lr=1e-4"),
    *("--data.dataset=synthetic", "--data.num_train=648", "--data.num_test=1", "--data.val_size=20"),
    *("--data.batch_size=32", "--trainer.log_every_n_steps=10", "--trainer.max_epochs=-1", "--resume=auto"),
    *("--trainer.accelerator=cpu", "--trainer.num_sanity_val_steps=0", "--trainer.enable_progress_bar=false"),
    *("--watchdog.timeout_s=5", "--figures.every_n_epochs=0", f"--last_checkpoint.every_n_steps={EVERY_N_STEPS}"),
]
DDP, PP, FSDP2, TP = ({2: mode_flags(mode)} for mode in ("ddp", "pp", "fsdp2", "tp"))
RESIZED = {
    num_ranks: ["--virtual_replicas=4", *mode_flags(mode, num_ranks)]
    for num_ranks, mode in {2: "ddp", 1: "single", 4: "fsdp2"}.items()
}
ALL = ["kill", "term", "stop", "kill", "term", "kill"]
FEW = ["kill", "term", "stop"]
RESIZES = ["resize", "kill", "resize", "term"]


class Job:
    """`fit` under torchrun, which starts killed ranks again, or Lightning's launcher. `with` leaves nothing of it.

    Args:
        folder: Where it writes its run, and what it prints.
        sizes: Flags by number of processes; a resized job goes through them in turns.
        under_torchrun: Whether torchrun starts it.
    """

    def __init__(self, folder: Path, sizes: Mapping[int, Sequence[str]], *, under_torchrun: bool) -> None:
        (folder / "steps").mkdir(parents=True)
        self._folder, self._run_dir = folder, f"--run_dir={folder / 'run'}"
        self._sizes, self._under_torchrun = cycle(sizes.items()), under_torchrun
        self._resize()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        """End every process, stopped and orphaned ones as well."""
        while found := marked(self._folder):
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=5)
        self._launcher.wait()

    def hit(self, kind: str, *, after: int, moment_s: float, rank: int) -> None:
        """Injects a fault so long after a step, and sees whether the job resumes."""
        self._await(lambda: bool(self._lines()) and self._lines()[-1][1] >= after, f"step {after} is not reached")
        time.sleep(moment_s)
        before = self._lines()[-1][0]
        if kind == "resize":
            self._launcher.terminate()
            self._launcher.wait(60)
            self._resize()
        else:
            self._await(lambda: rank in self._ranks(), f"there is no rank {rank}")
            with suppress(psutil.NoSuchProcess, KeyError):
                self._ranks()[rank].send_signal(SIGNALS[kind])
        self._await(lambda: self._lines()[-1][0] != before, f"the job is not back after {kind} at step {after}")
        begun = max(step for pid, step in self._lines() if pid == before)  # also after the signal
        repeated = begun + 1 - min(step for pid, step in self._lines() if pid == self._lines()[-1][0])
        assert repeated <= MOST_REPEATED[kind], f"{repeated} steps had to be repeated after {kind} at step {after}"

    def wait(self) -> None:
        self._await(lambda: self._launcher.poll() == 0, "the training does not end")

    def _resize(self) -> None:
        self._num_ranks, self._flags = next(self._sizes)
        self._start()

    def _start(self) -> None:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self._num_ranks}"]
        words = [*torchrun, "--max-restarts=99", "-m"] if self._under_torchrun else []
        words += ["lit_cifar", "fit", *self._flags, self._run_dir]
        words += callback("recorder.RecordIds", folder=self._folder / "steps")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        with (self._folder / "log.txt").open("ab") as log:
            self._launcher = subprocess.Popen([sys.executable, "-m", *words], env=environment, stdout=log, stderr=log)

    def _lines(self) -> list[tuple[int, int]]:
        """The process and the optimizer step of each that rank 0 has begun."""
        file = self._folder / "steps" / "rank0.jsonl"
        found = map(json.loads, file.read_text().splitlines() if file.exists() else [])
        return [(line["pid"], line["step"]) for line in found]

    def _ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in marked(self._folder):
            with suppress(psutil.Error):  # the process is gone
                environment = process.environ()
                if "torch.distributed.run" not in process.cmdline():
                    found[int(environment.get("RANK", environment.get("LOCAL_RANK", 0)))] = process
        return found

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Watch the job until the condition holds, and start it again whenever its launcher has given up."""

        def holds() -> bool:
            status = self._launcher.poll()
            if condition():
                return True
            assert status != 0, f"the training has ended, and {otherwise}"
            if status is not None:
                self._start()
            return False

        in_time = wait_until(holds, limit_s=LIMIT_S, poll_s=0.02)
        last_words = (self._folder / "log.txt").read_text(errors="replace")[-1000:]
        assert in_time, f"{otherwise} within {LIMIT_S:.0f} s; {last_words}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "faults", "under_torchrun"),
    graded(
        slow=[(DDP, ALL, True), (PP, FEW, False), (RESIZED, RESIZES, True)],
        exhaustive=[(PP, ALL, True), (FSDP2, ALL, True), (TP, ALL, True), (DDP, FEW, False)],
    ),
)
def test_nothing_is_lost(sizes: dict[int, list[str]], faults: list[str], under_torchrun: bool, tmp_path: Path) -> None:
    """Each fault comes within a random step of an equal part of the training, behind the second checkpoint."""
    start, draw = 2 * EVERY_N_STEPS, random.Random(len(ALL))
    length = f"--trainer.max_steps={start + SPACING * (len(faults) + 1)}"
    sizes = {num_ranks: [*SMALL, *flags, length] for num_ranks, flags in sizes.items()}
    folders = [tmp_path / name for name in ("undisturbed", "hit")]
    for folder, planned in zip(folders, ([], faults), strict=True):
        with Job(folder, sizes, under_torchrun=under_torchrun) as job:
            for number, kind in enumerate(planned):
                after = start + 2 + SPACING * number + draw.randrange(SPACING)
                job.hit(kind, after=after, moment_s=draw.random() / 10, rank=draw.randrange(min(sizes)))
            job.wait()
    runs = [folder / "run" for folder in folders]
    assert largest_difference(*runs) == 0
    pd.testing.assert_frame_equal(*map(metrics_without_clock, runs))
    first, second = ((run / "sample_audit.csv").read_text() for run in runs)
    assert first == second
    assert marked(tmp_path) == []
