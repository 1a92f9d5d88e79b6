"""A step of the visit, and what its checks are made of: runs with a time limit, and findings."""

import os
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpu_visit.processes import Ended, OutOfTimeError, run
from gpu_visit.report import Finding, Report, Status, StepReport

_RUN_LIMIT_S = 120.0
_REST = "the rest"
# Says what it has found, and figures if there are any; raises `FailedError` where that is wrong.
Check = Callable[[], str | tuple[str, dict[str, Any]]]


class FailedError(Exception):
    """What a check has found is wrong."""


class LeftOutError(Exception):
    """This machine cannot do it; says why."""


@dataclass
class Visit:
    """What all steps share."""

    work: Path  # folder for what need not be kept
    out: Path  # folder for what is
    accelerator: Literal["cuda", "cpu"]
    num_gpus: int
    data: list[str]  # flags that choose the images of the longer runs; none without a data set
    jobs: int  # processes at a time
    environment: dict[str, str]  # of every process
    patience: float = 1.0  # by which every time limit is multiplied

    @property
    def on_gpu(self) -> bool:
        """Else every step has its small size."""
        return self.accelerator == "cuda"

    def several(self) -> int:
        """All GPUs, or two devices of the CPU; raises `LeftOutError` where there is one GPU."""
        if self.on_gpu and self.num_gpus < 2:
            raise LeftOutError("one GPU is in this machine, and this needs several")
        return self.num_gpus if self.on_gpu else 2


class Step:
    """What a step is given to work with: `visit`, which all share, and `work`, a folder of its own."""

    def __init__(self, visit: Visit, report: Report, own: StepReport, *, limit_s: float) -> None:
        self.visit = visit
        self.work = visit.work / f"step{own.number}"
        self.work.mkdir(parents=True, exist_ok=True)
        self._report = report
        self._own = own
        self._deadline = time.monotonic() + limit_s

    def take(self, plan: Callable[["Step"], None]) -> None:
        """Do all of it; what goes wrong outside of its checks is noted too."""
        self._own.findings.pop(_REST, None)
        try:
            plan(self)
        except Exception as error:
            self._note(_REST, error)

    def check(self, name: str, check: Check) -> None:
        """Note what `check` finds; its failure stops nothing."""
        start = time.monotonic()
        try:
            answer = check()
        except Exception as error:
            self._note(name, error, seconds=time.monotonic() - start)
            return
        text, figures = answer if isinstance(answer, tuple) else (answer, {})
        self._found(Finding(name, "ok", text, time.monotonic() - start, figures))

    def check_all(self, checks: Mapping[str, Check]) -> None:
        """Several at once."""
        with ThreadPoolExecutor(self.visit.jobs) as pool:
            list(pool.map(self.check, checks, checks.values()))

    def _note(self, name: str, error: Exception, *, seconds: float = 0.0) -> None:
        known: dict[type[Exception], Status] = {OutOfTimeError: "time limit", LeftOutError: "left out"}
        status = known.get(type(error), "failed")
        text = str(error)
        if not isinstance(error, (FailedError, *known)):
            text = f"{type(error).__name__}: {error}"
            self._report.log(f"step {self._own.number}, {name}", "".join(traceback.format_exception(error)))
        self._found(Finding(name, status, text, seconds))

    def _found(self, finding: Finding) -> None:
        self._report.add(self._own, finding)
        print(f"{self._own.number} {finding.name}: {finding.status}, {finding.text[:300]}", flush=True)

    def run(self, name: str, *words: str, limit_s: float = _RUN_LIMIT_S) -> Ended:
        """`python -m WORDS` in a process of its own; raises `OutOfTimeError` when the time of the step is used up."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise OutOfTimeError("no time is left for it")
        threads = max(1, len(os.sched_getaffinity(0)) // self.visit.jobs)
        environment = {"OMP_NUM_THREADS": str(threads)} | self.visit.environment
        log = self.work / f"{name}.log"
        ended = run(words, environment=environment, log=log, timeout_s=min(left_s, self.visit.patience * limit_s))
        title = f"step {self._own.number}, {name}: {' '.join(words)}"
        self._report.log(f"{title}\n==== exit status {ended.status}, {ended.seconds:.1f} s", ended.output)
        if ended.status is None and time.monotonic() >= self._deadline:
            raise OutOfTimeError("no time is left for it")
        return ended

    def output_of(self, name: str, *words: str, limit_s: float = _RUN_LIMIT_S) -> str:
        """What it printed; raises `FailedError` if it did not end well."""
        ended = self.run(name, *words, limit_s=limit_s)
        if ended.status != 0:
            raise FailedError(ended.last_words)
        return ended.output

    def fit(self, name: str, *flags: str) -> Path:
        """Train; the run folder."""
        self.output_of(name, *self.words("fit", name, *flags))
        return self.run_folder(name)

    def words(self, subcommand: str, name: str, *flags: str) -> list[str]:
        """What `fit` runs, for those who look at its exit status themselves; later flags win."""
        usual = [f"--trainer.accelerator={self.visit.accelerator}", "--trainer.devices=1"]
        usual += [f"--model.arch={'resnet10' if self.visit.on_gpu else 'tiny'}"]
        return ["lit_cifar", subcommand, *usual, *flags, f"--run_dir={self.run_folder(name)}"]

    def run_folder(self, name: str) -> Path:
        """Of the run of that name."""
        return self.work / name
