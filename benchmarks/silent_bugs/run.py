"""Runs every case with its bug and mended, each watched by `Replay`, and writes what was found.

    python benchmarks/silent_bugs/run.py --out RECORD.json [CASE ...]

A run is "found" if a report fails, "noted" if it has a note or a reason to abstain that the mended twin has not, with
whatever numbers and names. It is a false alarm if a report of the mended twin fails. Beside it the losses: do those
with the bug leave the range of the mended twin's under five seeds?
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

from case import STEPS

from lit_cifar.tools.terminal import about

HERE = Path(__file__).parent
SEEDS = 5
LIMIT_S = 600


def run(case: str, *, bug: bool, seed: int = 0, watched: bool = False) -> dict[str, Any]:
    """Reports, losses, seconds and the exit status of one run."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
            "SILENT_BUG": str(int(bug)),
            "SILENT_BUG_SEED": str(seed),
            "SILENT_BUG_WATCHED": str(int(watched)),
            "SILENT_BUG_OUT": folder,
        }
        start = perf_counter()
        project = HERE / "cases" / case / "project.py"
        command = ["timeout", str(LIMIT_S), sys.executable, str(project)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        seconds = perf_counter() - start
        lines = {
            name: file.read_text().splitlines() if (file := Path(folder, name)).exists() else []
            for name in ("reports.jsonl", "losses.jsonl")
        }
    return {
        "exit_status": done.returncode,
        "seconds": seconds,
        "reports": [json.loads(line) for line in lines["reports.jsonl"]],
        "losses": [float(line) for line in lines["losses.jsonl"]],
        "error": done.stderr[-500:] if done.returncode else "",
    }


def said(one: dict[str, Any], what: str) -> list[str]:
    """Findings, notes or reasons to abstain, of all reports of a run."""
    found = [its for report in one["reports"] for its in report[what]]
    return [its if isinstance(its, str) else f"{its['part']}: {its['tensor']} {its['text']}" for its in found]


def kind(line: str) -> str:
    """A note without its numbers and names."""
    return re.sub(r"\S*[\d._]\S*", "_", line)


def judged(case: str) -> dict[str, Any]:
    """What `Replay` and the losses say of a case."""
    with_bug, mended = (run(case, bug=bug, watched=True) for bug in (True, False))
    others = [run(case, bug=False, seed=seed) for seed in range(1, SEEDS)]
    findings = said(with_bug, "findings")
    known = {kind(line) for what in ("notes", "abstained") for line in said(mended, what)}
    hints = [line for what in ("notes", "abstained") for line in said(with_bug, what) if kind(line) not in known]
    about = tomllib.loads((HERE / "cases" / case / "case.toml").read_text())
    return {
        "case": case,
        "report": about["report"],
        "class": about["class"],
        "kind": about["kind"],
        "place": about["place"],
        "found": "fail" if findings else "note" if hints else "",
        "said": (findings or hints)[:2],
        "false_alarm": said(mended, "findings")[:2],
        "outcomes_mended": [report["outcome"] for report in mended["reports"]],
        "beyond_seed_noise": beyond_noise(with_bug["losses"], [mended["losses"], *(one["losses"] for one in others)]),
        "seconds": round(with_bug["seconds"], 1),
        "exit_status": [with_bug["exit_status"], mended["exit_status"], *(one["exit_status"] for one in others)],
        "errors": [one["error"] for one in (with_bug, mended, *others) if one["error"]],
    }


def beyond_noise(losses: list[float], seeds: list[list[float]]) -> bool:
    """Whether the mean of the last quarter of the losses lies outside the range of those of the seeds."""
    if not losses or not all(seeds):
        return False

    def last(its: list[float]) -> float:
        quarter = its[-max(1, len(its) // 4) :]
        return sum(quarter) / len(quarter)

    range_of = [last(its) for its in seeds]
    return not min(range_of) <= last(losses) <= max(range_of)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="Default: all.")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="Begin with every Nth case.")
    parser.add_argument(
        "--at-once", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="Cases beside each other."
    )
    options = parser.parse_args()
    cases = options.cases or sorted(path.name for path in (HERE / "cases").iterdir())
    cases = [case for first in range(options.every) for case in cases[first :: options.every]]
    record: dict[str, Any] = about() | {"steps": STEPS, "seeds": SEEDS, "rows": []}
    rows = record["rows"]
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(judged, cases):
            rows.append(row)
            print(f"{row['case']:32} {row['found'] or '-':5} {'FALSE ALARM' if row['false_alarm'] else ''}", flush=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["false_alarm"] or any(row["exit_status"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
