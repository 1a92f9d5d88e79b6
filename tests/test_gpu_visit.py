"""The script for a machine with a GPU: that it says what it found, whatever goes wrong; and all of it on a CPU."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from documents import BENCHMARKS, ROOT, SCRIPTS
from processes import is_running

sys.path.insert(0, str(SCRIPTS))

from gpu_visit import __main__ as leader
from gpu_visit import callbacks, processes
from gpu_visit.plans import PLANS, Plan
from gpu_visit.report import Report, StepReport
from gpu_visit.step import FailedError, Step, Visit


@pytest.fixture
def visit(tmp_path: Path) -> Visit:
    (tmp_path / "out").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONFAULTHANDLER": "1"}
    return Visit(
        work=tmp_path / "work", out=tmp_path / "out", accelerator="cpu", data=[], jobs=2, environment=environment
    )


def visited(visit: Visit, *steps: Callable[[Step], None], limit_s: float = 60, step_s: float = 30) -> Report:
    """A visit of these steps."""
    plans = [Plan(step.__name__, step, step_s) for step in steps]
    own = [StepReport(number, plan.title) for number, plan in enumerate(plans, 1)]
    report = Report(visit.out, own, about={})
    leader.take(list(zip(plans, own, strict=True)), visit, report, limit_s=limit_s)
    return report


def program(visit: Visit, name: str, code: str) -> str:
    """The name of a module that the processes of a visit find."""
    (visit.work.parent / f"{name}.py").write_text(code)
    return name


def fails(step: Step) -> None:
    def wrong() -> str:
        raise FailedError("two | three")

    step.check("right", lambda: "fine")
    step.check("wrong", wrong)
    raise RuntimeError("of the step itself")


def works(step: Step) -> None:
    step.check("number", lambda: ("found", {"n": 1}))


def test_a_step_that_fails_does_not_stop_the_next(visit: Visit) -> None:
    first, second = visited(visit, fails, works).steps
    assert [(f.name, f.status) for f in first.findings] == [
        ("right", "ok"),
        ("wrong", "failed"),
        ("the rest", "failed"),
    ]
    assert (first.status, second.status) == ("failed", "ok")
    assert "RuntimeError: of the step itself" in (visit.out / "log.txt").read_text()
    table = (visit.out / "summary.md").read_text()
    assert "| 1 fails | failed | 0 | 2 of 3 not right: wrong: two \\| three; the rest: RuntimeError" in table
    assert "| 2 works | ok | 0 | 1 checks |" in table
    results = json.loads((visit.out / "results.json").read_text())
    assert results["steps"][1]["findings"][0]["figures"] == {"n": 1}


def test_a_process_that_hangs_is_asked_where_and_ended_with_all_that_it_has_started(visit: Visit) -> None:
    code = """
import faulthandler, subprocess, sys, time
faulthandler.enable()  # as PYTHONFAULTHANDLER does in the process from which those of a visit are forked
words = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(words, start_new_session=True).pid, flush=True)
def where_it_hangs():
    time.sleep(600)
where_it_hangs()
"""
    name = program(visit, "hangs", code)

    def hangs(step: Step) -> None:
        step.check("hangs", lambda: step.output_of("hangs", name, limit_s=2))
        step.check("works", lambda: "fine")

    hung, fine = visited(visit, hangs).steps[0].findings
    assert (hung.status, fine.status) == ("failed", "ok")
    assert hung.text.startswith("time limit after")
    log = (visit.out / "log.txt").read_text()
    assert "in where_it_hangs" in log
    grandchild = int(next(line for line in log.splitlines() if line.isdecimal()))
    deadline = time.monotonic() + 5
    while psutil.pid_exists(grandchild) and is_running(psutil.Process(grandchild)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_steps_and_visits_end_with_their_time_or_when_stopped(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    name = program(visit, "sleeps", "import time; time.sleep(600)")

    def slow(step: Step) -> None:
        step.check("sleeps", lambda: step.output_of("sleeps", name))
        step.check("comes too late", lambda: step.output_of("late", name))

    def stopped(step: Step) -> None:
        processes.end_all()
        step.check("after", lambda: step.output_of("after", name))

    report = visited(visit, slow, works, step_s=1)
    assert [finding.status for finding in report.steps[0].findings] == ["time limit", "time limit"]
    assert [step.status for step in report.steps] == ["time limit", "ok"]
    assert [step.status for step in visited(visit, works, limit_s=-1).steps] == ["no time left"]
    monkeypatch.setattr(processes, "_over", processes.threading.Event())
    assert [step.status for step in visited(visit, stopped).steps] == ["time limit"]


def test_the_wheels_cover_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    of_the_machine = {"torch", "torchvision", "lightning", "torchmetrics", "tensorboard", "numpy", "tqdm", "lit-cifar"}
    floors = [re.match(r"([\w-]+)(?:\[.*\])?(>=[\d.]+)?", each.lower()) for each in needed]
    there = {word.strip("'") for word in (BENCHMARKS / "gpu_wheels.sh").read_text().split() if ">=" in word}
    assert {f"{each[1]}{each[2]}" for each in floors if each and each[1] not in of_the_machine} == there


def test_warnings_about_waits_are_noted_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch gives them on a GPU."""
    modes: list[str] = []
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    places: Counter[str] = Counter()
    with callbacks.warned_of(places):
        for text in ("called a synchronizing CUDA operation (Triggered internally ...)", "another") * 2:
            warnings.warn(text, stacklevel=1)
    assert modes == ["warn", "default"]
    ((place, count),) = places.items()
    assert count == 2
    assert place.startswith("tests/test_gpu_visit.py:")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_all_steps_run_on_a_cpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    words = ["bash", ROOT / "benchmarks" / "gpu_visit.sh", tmp_path / "out", "--cpu", "--seconds=560"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(s["title"], f) for s in results["steps"] for f in s["findings"] if f["status"] != "ok"] == []
    assert [step["status"] for step in results["steps"]] == ["ok"] * len(PLANS)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"summary.md", "results.json", "log.txt", "trace.json.gz"}
