"""The script for a machine with a GPU: its commands can be typed, and all of it runs on a CPU."""

import json
import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from documents import BENCHMARKS, ROOT, SCRIPTS
from test_readme import check_benchmark, check_program

sys.path.insert(0, str(SCRIPTS))

from gpu_visit import __main__ as leader
from gpu_visit import processes
from gpu_visit.plans import PLANS
from gpu_visit.report import Report
from gpu_visit.step import Step, Visit


@pytest.mark.slow
def test_the_commands_for_gpus_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no machine without one runs: on eight all modes, sizes and recipes."""
    typed: list[tuple[str, ...]] = []

    def run(step: Step, name: str, *words: str, limit_s: float = 0) -> processes.Ended:
        typed.append(words)
        return processes.Ended(143 if any("Terminate" in word for word in words) else 0, "", 0.0)

    monkeypatch.setattr(Step, "run", run)
    about = {"started": "2026-01-01", "gpus": [], "git": None, "command": "visit"}
    report = Report(tmp_path, [plan.title for plan in PLANS], about=about)
    sizes = {"accelerator": "cuda", "num_gpus": 8, "jobs": 8}
    eight = Visit(work=tmp_path / "work", out=tmp_path, data=[], environment={**os.environ}, **sizes)
    leader.take(list(zip(PLANS, report.steps, strict=True)), eight, report, limit_s=60)
    assert len(typed) > 100
    for program, *words in sorted(set(typed)):
        if program != "pytest":
            (check_program if program == "lit_cifar" else partial(check_benchmark, program))(words)


def test_the_wheels_cover_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    of_the_machine = {"torch", "torchvision", "lightning", "torchmetrics", "tensorboard", "numpy", "tqdm", "lit-cifar"}
    floors = [re.match(r"([\w-]+)(?:\[.*\])?(>=[\d.]+)?", each.lower()) for each in needed]
    there = {word.strip("'") for word in (BENCHMARKS / "gpu_wheels.sh").read_text().split() if ">=" in word}
    assert {f"{each[1]}{each[2]}" for each in floors if each and each[1] not in of_the_machine} == there


@pytest.mark.exhaustive
@pytest.mark.timeout(1300)
def test_all_steps_run_on_a_cpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    words = ["bash", ROOT / "benchmarks" / "gpu_visit.sh", tmp_path / "out", "--cpu"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(s["title"], f) for s in results["steps"] for f in s["findings"].values() if f["status"] != "ok"] == []
    assert [step["status"] for step in results["steps"]] == ["ok"] * len(PLANS)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"summary.md", "results.json", "log.txt", "articles.json"}
    assert {"recipe-muon_12_epochs.json", "default-0-metrics.csv"} <= names
