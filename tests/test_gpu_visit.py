"""The script for a machine with a GPU: that it says what it found, whatever goes wrong; and all of it on a CPU."""

import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from documents import BENCHMARKS, ROOT
from torch.autograd import DeviceType

import lit_cifar

sys.path.insert(0, str(BENCHMARKS))

from gpu_visit import __main__ as leader
from gpu_visit import clocks, host_waits, processes, wheels
from gpu_visit.report import Finding, Report, StepReport
from gpu_visit.step import FailedError, Step, Visit
from gpu_visit.steps import PLANS, Plan


@pytest.fixture
def visit(tmp_path: Path) -> Visit:
    (tmp_path / "out").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONFAULTHANDLER": "1"}
    return Visit(
        work=tmp_path / "work", out=tmp_path / "out", accelerator="cpu", data=[], jobs=2, environment=environment
    )


def visited(visit: Visit, *steps: Callable[[Step], None], limit_s: float = 60, step_s: float = 30) -> Report:
    """A visit of these steps."""
    plans = [Plan(step.__name__, step, step_s, number) for number, step in enumerate(steps)]
    own = [StepReport(number, plan.title) for number, plan in enumerate(plans, 1)]
    report = Report(visit.out, own, about={})
    leader.take(list(zip(plans, own, strict=True)), visit, report, limit_s=limit_s)
    return report


def fails(step: Step) -> None:
    def wrong() -> str:
        raise FailedError("two | three")

    step.check("right", lambda: "fine")
    step.check("wrong", wrong)
    raise RuntimeError("of the step itself")


def works(step: Step) -> None:
    step.check("number", lambda: ("found", {"n": 1}))


def test_a_command_runs_in_a_forked_process(tmp_path: Path) -> None:
    ended = processes.run(
        ["lit_cifar", "--version"], environment=dict(os.environ), log=tmp_path / "log", timeout_s=60, forked=True
    )
    assert (ended.status, ended.output) == (0, f"lit_cifar {lit_cifar.__version__}\n")


def program(visit: Visit, name: str, code: str) -> str:
    """The name of a module that the processes of a visit find."""
    (visit.work.parent / f"{name}.py").write_text(code)
    return name


def test_a_step_that_fails_does_not_stop_the_next(visit: Visit) -> None:
    report = visited(visit, fails, works)
    first, second = report.steps
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
import subprocess, sys, time
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

    report = visited(visit, hangs)
    hung, fine = report.steps[0].findings
    assert (hung.status, fine.status) == ("failed", "ok")
    assert hung.text.startswith("time limit after")
    log = (visit.out / "log.txt").read_text()
    assert "in where_it_hangs" in log
    grandchild = int(next(line for line in log.splitlines() if line.isdecimal()))
    deadline = time.monotonic() + 5
    while (alive := _is_running(grandchild)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_step_ends_with_its_time_and_the_visit_with_its_own(visit: Visit) -> None:
    name = program(visit, "sleeps", "import time; time.sleep(600)")

    def slow(step: Step) -> None:
        step.check("sleeps", lambda: step.output_of("sleeps", name))
        step.check("comes too late", lambda: step.output_of("late", name))

    report = visited(visit, slow, works, step_s=1)
    assert [(f.name, f.status) for f in report.steps[0].findings] == [
        ("sleeps", "time limit"),
        ("comes too late", "time limit"),
    ]
    assert [step.status for step in report.steps] == ["time limit", "ok"]
    assert [step.status for step in visited(visit_again(visit), works, limit_s=-1).steps] == ["no time left"]


def visit_again(visit: Visit) -> Visit:
    return Visit(**{**vars(visit), "work": visit.work / "again"})


def test_nothing_starts_once_the_visit_is_told_to_stop(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_over", processes.threading.Event())
    name = program(visit, "prints", "print(1)")

    def stopped(step: Step) -> None:
        step.check("before", lambda: step.output_of("before", name))
        processes.end_all()
        step.check("after", lambda: step.output_of("after", name))

    assert [f.status for f in visited(visit, stopped).steps[0].findings] == ["ok", "time limit"]


def test_a_log_keeps_beginning_and_end_and_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_visit.report.MAX_LOG_CHARS", 200_000)
    report = Report(tmp_path, [], about={})
    for number in range(3):
        report.log(f"entry {number}", f"begins{'.' * 1_000_000}ends")
    text = (tmp_path / "log.txt").read_text()
    assert "begins" in text
    assert "ends\n" in text
    assert "entry 1" not in text
    assert len(text) < 200_000


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((), "no time left"),
        (("ok", "info"), "ok"),
        (("ok", "time limit"), "time limit"),
        (("time limit", "failed", "ok"), "failed"),
    ],
)
def test_a_step_is_as_good_as_its_worst_check(statuses: tuple[str, ...], expected: str) -> None:
    findings = [Finding("check", status, "text") for status in statuses]
    assert StepReport(1, "title", findings=findings).status == expected


def test_wheels_are_installed_where_a_package_is_missing_or_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "PyYAML-6.0.3-cp312-cp312-manylinux1_x86_64",
        "no_such_thing-1.0-py3-none-any",
        "psutil-7.2-cp36-abi3",
    ):
        (tmp_path / f"{name}.whl").touch()
    assert [path.name.split("-")[0] for path in wheels.missing(tmp_path, wheels.floors())] == ["no_such_thing"]
    monkeypatch.setattr(wheels, "version", lambda name: {"psutil": "5.9.8", "pyyaml": "6.0+local"}.get(name, "1.0"))
    assert [path.name.split("-")[0] for path in wheels.missing(tmp_path, wheels.floors())] == ["psutil"]


def test_the_wheels_cover_what_the_package_needs() -> None:
    script = (BENCHMARKS / "gpu_wheels.sh").read_text()
    of_the_machine = {"torch", "torchvision", "lightning", "torchmetrics", "tensorboard", "numpy", "lit-cifar"}
    needed = wheels.floors().items()
    assert {f"{name}>={floor}" for name, floor in needed if name not in of_the_machine} == {
        word.strip("'") for word in script.split() if ">=" in word
    }


def test_warnings_about_waits_are_noted_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch gives them on a GPU."""
    modes: list[str] = []
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    places: Counter[str] = Counter()
    with host_waits._warned_of(places):
        for text in ("called a synchronizing CUDA operation (Triggered internally ...)", "another") * 2:
            warnings.warn(text, stacklevel=1)
    assert modes == ["warn", "default"]
    ((place, count),) = places.items()
    assert count == 2
    assert place.startswith("tests/test_gpu_visit.py:")


def test_the_time_of_a_gpu_is_that_of_its_kernels() -> None:
    """What torch's profiler tells of a convolution with one kernel, and of the optimizer's step around it."""
    events = [
        SimpleNamespace(device_type=DeviceType.CPU, is_user_annotation=False, self_device_time_total=3e6),
        SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=False, self_device_time_total=3e6),
        SimpleNamespace(device_type=DeviceType.CUDA, is_user_annotation=True, self_device_time_total=9e6),
    ]
    assert clocks.device_s(events) == 3


def test_steps_can_be_chosen_by_number() -> None:
    assert [plan.round for plan in PLANS] == sorted(plan.round for plan in PLANS)
    assert leader.parser().parse_args(["out", "--steps=1,9"]).steps == [1, 9]
    with pytest.raises(SystemExit):
        leader.parser().parse_args(["out", "--steps=11"])


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_all_steps_run_on_a_cpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    words = ["bash", ROOT / "benchmarks" / "gpu_visit.sh", tmp_path / "out", "--cpu", "--seconds=560"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    wrong = [(s["title"], f) for s in results["steps"] for f in s["findings"] if f["status"] not in ("ok", "info")]
    assert wrong == []
    assert [step["status"] for step in results["steps"]] == ["ok"] * len(PLANS)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("summary.md", "results.json", "log.txt", "profile.txt", "trace.json.gz"),
    }
