"""Judges every case by `python -m lit_cifar relations`, with its bug and mended, and writes what was found.

    python benchmarks/silent_bugs/relate.py --out RECORD.json [--unedited] [CASE ...]

A project in plain PyTorch gets the calls of `lit_cifar.relations` by `related.patch`; one with Lightning, and with
`--unedited` each, is judged as it is. A bug is "found" if a relation fails that does not fail in the mended twin,
"noted" if a verdict is a note, an abstention or a crash that the mended twin has not, with whatever numbers and names.
Each failure of the mended twin is a false alarm, also one by a mistake of the installed library.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from lit_cifar.checks.relations.judging import RELATIONS, judged
from lit_cifar.checks.relations.plan import LIMIT_S, Limits, Target
from lit_cifar.checks.verdict import Verdict
from lit_cifar.tools.terminal import about

HERE = Path(__file__).parent
LIMITS = Limits()  # as of the command
_HINTS = ("note", "abstain", "crash")


def verdicts(script: Path, *, bug: bool) -> list[Verdict]:
    """What all relations say of one twin."""
    os.environ["SILENT_BUG"] = str(int(bug))  # a run has the environment of this process
    with tempfile.TemporaryDirectory() as folder:
        return list(judged(Target(program=str(script), folder=folder), RELATIONS, limits=LIMITS, limit_s=LIMIT_S))


def row(case: str, *, unedited: bool) -> dict[str, Any]:
    """What the relations say of a case."""
    project, patch = (HERE / "cases" / case / name for name in ("project.py", "related.patch"))
    is_patched = patch.exists() and not unedited
    start = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "related.py") if is_patched else project
        if is_patched:
            subprocess.run(["patch", "--silent", f"--output={script}", str(project), str(patch)], check=True)
        with_bug, mended = (verdicts(script, bug=bug) for bug in (True, False))
    seconds = perf_counter() - start
    alarms = [verdict for verdict in mended if verdict.outcome == "fail"]
    failed = {verdict.relation for verdict in alarms}
    known = {kind(verdict.text) for verdict in mended}
    fails = [verdict for verdict in with_bug if verdict.outcome == "fail" and verdict.relation not in failed]
    hints = [verdict for verdict in with_bug if verdict.outcome in _HINTS and kind(verdict.text) not in known]
    telling = fails or hints
    of_case = tomllib.loads((HERE / "cases" / case / "case.toml").read_text())
    return {
        "case": case,
        **{name: of_case[name] for name in ("report", "class", "kind", "place")},
        "added_lines": added_lines(patch) if is_patched else None,
        "found": "fail" if fails else "note" if hints else "",
        "said": lines(telling)[:2],
        "relations": [verdict.relation for verdict in telling],
        "false_alarm": lines(alarms)[:2],
        "outcomes": outcomes(with_bug),
        "outcomes_mended": outcomes(mended),
        "reasons": lines(verdict for verdict in mended if verdict.outcome in _HINTS),
        "seconds": round(seconds, 1),
    }


def kind(line: str) -> str:
    """What a verdict says, without its numbers and names."""
    return re.sub(r"\S*[\d._]\S*", "_", line)


def lines(verdicts: Iterable[Verdict]) -> list[str]:
    return [f"{verdict.relation}: {verdict.text}" for verdict in verdicts]


def outcomes(verdicts: Iterable[Verdict]) -> dict[str, str]:
    return {verdict.relation: verdict.outcome for verdict in verdicts}


def added_lines(patch: Path) -> int:
    """Lines that the patch adds, without blank ones; a changed line is one of them."""
    added = (line[1:] for line in patch.read_text().splitlines() if line.startswith("+") and not line.startswith("+++"))
    return sum(bool(line.strip()) for line in added)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="Default: all.")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    parser.add_argument("--unedited", action="store_true", help="Without the calls that a patch adds.")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="Cases beside each other.")
    options = parser.parse_args()
    cases = options.cases or sorted(path.name for path in (HERE / "cases").iterdir())
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]  # a run gets these as PYTHONPATH
    record: dict[str, Any] = about() | {"limits": vars(LIMITS), "limit_s": LIMIT_S, "rows": []}
    with ProcessPoolExecutor(options.at_once, mp_context=get_context("spawn")) as pool:
        for one in pool.map(partial(row, unedited=options.unedited), cases):
            record["rows"].append(one)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
            alarm = "FALSE ALARM" if one["false_alarm"] else ""
            print(f"{one['case']:32} {one['found'] or '-':5} {alarm:12} {'; '.join(one['said'])[:160]}", flush=True)
    return int(any(one["false_alarm"] for one in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
