"""How other tools are run on a case, and what counts as found: the same as for `Replay`.

Found is what stops or fails the run with the bug, noted a warning that the mended twin has not, a false alarm what
stops or fails the mended twin.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).parent
LIMIT_S = 1800  # of each of TrainCheck's commands
WARNING = re.compile(r"(?:\b\w*Warning: |\[rank\d\]:\[W|^\[W)(.*)")
PACKAGES = ("traincheck", "torch", "lightning", "numpy", "pandas")


def row(case: str, problems: list[list[str]], hints: list[str], seconds: float, statuses: list[int]) -> dict[str, Any]:
    """What a tool says of the run with the bug and of the mended twin."""
    with_bug, mended = problems
    return {
        "case": case,
        "found": "fail" if with_bug else "note" if hints else "",
        "said": (with_bug or hints)[:2],
        "false_alarm": mended[:2],
        "seconds": round(seconds, 1),
        "exit_status": statuses,
    }


def environment(case: str, tool: str) -> dict[str, str]:
    """Beside it, `case.py` sets `torch.autograd.set_detect_anomaly`."""
    source = (HERE / "cases" / case / "project.py").read_text()
    # With DETAIL the constructor of DDP crashes with gloo, in torch 2.13.0 and 2.14.1.
    level = "INFO" if re.search(r"DistributedDataParallel|lightning", source) else "DETAIL"
    return {"TORCH_DISTRIBUTED_DEBUG": level} if tool == "torch-checks" else {}


def failure(stderr: str) -> list[str]:
    """The lines of errors that a run ended with."""
    return [
        line[:300] for line in stderr.splitlines() if re.match(r"(\[rank\d\]: )?[\w.]*(Error|Exception)\b", line)
    ] or ["?"]


def torch_checks(run: Callable[..., dict[str, Any]], case: str) -> dict[str, Any]:
    """`TORCH_DISTRIBUTED_DEBUG`, the detection of anomalies and warnings."""
    runs = [run(case, bug=bug, tool="torch-checks") for bug in (True, False)]
    problems = [failure(one["stderr"]) if one["exit_status"] == 1 else [] for one in runs]
    with_bug, mended = ([said[1].strip() for said in WARNING.finditer(one["stderr"])] for one in runs)
    known = {re.sub(r"\S*\d\S*", "_", line) for line in mended}
    hints = [line[:300] for line in dict.fromkeys(with_bug) if re.sub(r"\S*\d\S*", "_", line) not in known]
    return row(case, problems, hints, runs[0]["seconds"], [one["exit_status"] for one in runs])


def versions(folder: Path) -> dict[str, str]:
    """Of what is installed beside TrainCheck."""
    code = f"from importlib.metadata import version; print(*map(version, {PACKAGES}))"
    said = subprocess.run([folder / "python", "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(zip(PACKAGES, said.split(), strict=True))


def traincheck(folder: Path, case: str) -> dict[str, Any]:
    """Invariants are inferred from the mended twin (seed 1), then checked with the bug (seed 0) and mended (seed 2).

    The commands are those of its README. It tracks what the project watches, by the name it has there.
    """
    source = (HERE / "cases" / case / "project.py").read_text()
    watched = re.search(r"\bwatch\((\w+)", source) or re.search(r"\bfit\((\w+)", source)
    model = ["--models-to-track", watched[1]] if watched and f" {watched[1]} = " in source else []
    statuses: list[int] = []
    seconds: list[float] = []
    problems: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        for file in ("case.py", "watcher.py", f"cases/{case}/project.py"):
            shutil.copy(HERE / file, name)

        def call(command: str, *options: str, bug: bool = False, seed: int = 0) -> None:
            if any(statuses):
                return
            env = os.environ | {"SILENT_BUG": str(int(bug)), "SILENT_BUG_SEED": str(seed), "SILENT_BUG_OUT": name}
            full = ["timeout", str(LIMIT_S), str(folder / f"traincheck-{command}"), *options]
            start = perf_counter()
            statuses.append(subprocess.run(full, cwd=name, env=env, capture_output=True, text=True).returncode)
            seconds.append(round(perf_counter() - start, 1))

        collect = ("collect", "--pyscript", "project.py", *model, "--output-dir")
        call(*collect, "reference", seed=1)
        call("infer", "-f", "reference", "-o", "invariants.json")
        for run, bug, seed in (("bug", True, 0), ("mended", False, 2)):
            call(*collect, run, "--invariants", "invariants.json", bug=bug, seed=seed)
            call("check", "-f", run, "-i", "invariants.json", "-o", f"checked_{run}", "--no-html-report")
        for run in ("bug", "mended"):
            found = [
                json.loads(file.read_text()) for file in Path(name).glob(f"checked_{run}/*/violations_summary.json")
            ]
            problems.append([its["display_name"] for one in found for its in one["violations"]])
    return row(case, problems, [], sum(seconds), statuses) | {"seconds_of_commands": seconds}
