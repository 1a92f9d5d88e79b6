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
Check = Callable[[], str | tuple[str, dict[str, Any]]]
"""Says what it has found, and figures if there are any; raises `FailedError` where that is wrong."""

TINY = (
    "--model.stem=imagenet",
    "--data.dataset=synthetic",
    "--data.num_train=96",
    "--data.num_test=100",
    "--data.val_size=16",
    "--data.batch_size=16",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.log_every_n_steps=1",
    "--figures.every_n_epochs=0",
)


class FailedError(Exception):
    """What a check has found is wrong."""


@dataclass
class Visit:
    """What all steps share.

    Attributes:
        work: Folder for what need not be kept.
        out: Folder for what is.
        accelerator: "cuda" or "cpu".
        data: Flags that choose the images of the longer runs.
        jobs: Processes at a time.
        environment: Of every process.
        forked: Whether runs of the command line are forked; not where forked processes cannot use the GPU.
        site: Where missing packages were installed; None without any.
    """

    work: Path
    out: Path
    accelerator: Literal["cuda", "cpu"]
    data: list[str]
    jobs: int
    environment: dict[str, str]
    forked: bool = True
    site: Path | None = None

    @property
    def on_gpu(self) -> bool:
        """Else every step has its small size."""
        return self.accelerator == "cuda"

    @property
    def threads(self) -> int:
        """Of each of the processes that run at a time."""
        return max(1, (os.cpu_count() or 1) // self.jobs)


class Step:
    """What a step is given to work with.

    Attributes:
        visit: What all share.
        work: A folder of its own, which exists.
    """

    def __init__(self, visit: Visit, report: Report, own: StepReport, *, limit_s: float) -> None:
        self.visit = visit
        self.work = visit.work / f"step{own.number}"
        self.work.mkdir(parents=True)
        self._report = report
        self._own = own
        self._deadline = time.monotonic() + limit_s

    def found(
        self, name: str, status: Status, text: str, *, seconds: float = 0.0, figures: dict[str, Any] | None = None
    ) -> None:
        """Note it at once."""
        self._own.findings.append(Finding(name, status, text, seconds, figures or {}))
        self._report.write()
        print(f"{self._own.number} {name}: {status}, {text[:300]}", flush=True)

    def take(self, plan: Callable[["Step"], None]) -> None:
        """Do all of it; what goes wrong outside of its checks is noted too."""
        try:
            plan(self)
        except OutOfTimeError:
            self.found("the rest", "time limit", "no time is left for it")
        except Exception as error:
            self._report.log(f"step {self._own.number}", traceback.format_exc())
            self.found("the rest", "failed", f"{type(error).__name__}: {error}")

    def check(self, name: str, check: Check) -> bool:
        """Note what `check` finds, and whether that is right; its failure stops nothing."""
        start = time.monotonic()
        status: Status = "failed"
        figures: dict[str, Any] = {}
        try:
            answer = check()
            text, figures = answer if isinstance(answer, tuple) else (answer, {})
            status = "ok"
        except OutOfTimeError:
            status, text = "time limit", "no time is left for it"
        except FailedError as error:
            text = str(error)
        except Exception as error:
            self._report.log(f"step {self._own.number}, {name}", traceback.format_exc())
            text = f"{type(error).__name__}: {error}"
        self.found(name, status, text, seconds=time.monotonic() - start, figures=figures)
        return status == "ok"

    def check_all(self, checks: Mapping[str, Check]) -> None:
        """Several at once."""
        with ThreadPoolExecutor(self.visit.jobs) as pool:
            list(pool.map(self.check, checks, checks.values()))

    def run(self, name: str, *words: str, limit_s: float = _RUN_LIMIT_S, forked: bool | None = None) -> Ended:
        """`python -m WORDS` in a process of its own.

        Raises:
            OutOfTimeError: No time is left, or it was stopped as the time of the step was used up.
        """
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise OutOfTimeError
        fork = words[0] == "lit_cifar" and (self.visit.forked if forked is None else forked)
        environment = {"OMP_NUM_THREADS": str(self.visit.threads)} | self.visit.environment
        log = self.work / f"{name}.log"
        ended = run(words, environment=environment, log=log, timeout_s=min(left_s, limit_s), forked=fork)
        title = f"step {self._own.number}, {name}: {' '.join(words)}"
        self._report.log(f"{title}\n==== exit status {ended.status}, {ended.seconds:.1f} s", ended.output)
        if ended.status is None and time.monotonic() >= self._deadline:
            raise OutOfTimeError
        return ended

    def output_of(self, name: str, *words: str, limit_s: float = _RUN_LIMIT_S, forked: bool | None = None) -> str:
        """What it printed.

        Raises:
            FailedError: It did not end well.
            OutOfTimeError: As of `run`.
        """
        ended = self.run(name, *words, limit_s=limit_s, forked=forked)
        if ended.status != 0:
            raise FailedError(ended.last_words)
        return ended.output

    def fit(self, name: str, *flags: str, limit_s: float = _RUN_LIMIT_S, forked: bool | None = None) -> Path:
        """Train; the run folder.

        Raises:
            FailedError: As of `output_of`.
            OutOfTimeError: As of `run`.
        """
        folder = self.run_folder(name)
        self.output_of(name, *self.fit_words(name, *flags), limit_s=limit_s, forked=forked)
        return folder

    def fit_words(self, name: str, *flags: str) -> list[str]:
        """What `fit` runs, for those who look at its exit status themselves; later flags win."""
        usual = [f"--trainer.accelerator={self.visit.accelerator}", "--trainer.devices=1"]
        usual += [f"--model.arch={'resnet10' if self.visit.on_gpu else 'tiny'}"]
        return ["lit_cifar", "fit", *usual, *flags, f"--run_dir={self.run_folder(name)}"]

    def run_folder(self, name: str) -> Path:
        """Of the run of that name."""
        return self.work / name / "run"
