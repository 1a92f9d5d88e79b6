"""What has been found, written down as soon as it is known: a table, everything as JSON, and one log."""

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "time limit", "left out"]
_KEPT_CHARS = 30_000  # at the beginning and at the end of what one process has printed


@dataclass(frozen=True)
class Finding:
    """What came out of one check."""

    name: str
    status: Status
    text: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M"))


@dataclass
class StepReport:
    """A step and what it has found so far, in this visit and in earlier ones to the same folder."""

    number: int
    title: str
    seconds: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)  # by name
    ended: bool = False

    @property
    def status(self) -> str:
        """The worst of its findings."""
        found: set[str] = {finding.status for finding in self.findings.values()}
        if not self.ended:
            return "not ended" if found else "not taken"
        worst = next((status for status in ("failed", "time limit") if status in found), "ok")
        return "left out" if found == {"left out"} else worst

    @property
    def text(self) -> str:
        other = [f"{f.name}: {f.text[:160]}" for f in self.findings.values() if f.status != "ok"]
        total = len(self.findings)
        return "; ".join([f"{total - len(other)} of {total} checks passed", *other]) if total else ""

    def add(self, finding: Finding) -> None:
        """In the place of the earlier one of that name, unless now there was no time for it."""
        if finding.status != "time limit" or finding.name not in self.findings:
            self.findings[finding.name] = finding


class Report:
    """The files of a visit: `summary.md`, `results.json` and `log.txt` in `out`.

    What earlier visits to that folder have found is kept.

    Args:
        out: Exists.
        titles: Of all steps, in the order of the table.
        about: What the visit is of: command, time, machine.
    """

    def __init__(self, out: Path, titles: Sequence[str], *, about: dict[str, Any]) -> None:
        self.out = out
        self._lock = threading.Lock()
        file = out / "results.json"
        earlier: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"visits": [], "steps": []}
        self.visits = [*earlier["visits"], about]
        self.steps = [StepReport(number, title) for number, title in enumerate(titles, 1)]
        for step in self.steps:
            for found in (each for each in earlier["steps"] if each["title"] == step.title):
                step.seconds, step.ended = found["seconds"], found["ended"]
                step.findings = {name: Finding(**each) for name, each in found["findings"].items()}

    def add(self, step: StepReport, finding: Finding) -> None:
        """Add what one of several threads has found, and write all."""
        with self._lock:
            step.add(finding)
        self.write()

    def write(self) -> None:
        """Replace table and results; called after every finding, as nobody knows which is the last."""
        with self._lock:
            (self.out / "summary.md").write_text(self.table())
            steps = [asdict(step) | {"status": step.status} for step in self.steps]
            content = {"visits": self.visits, "steps": steps}
            (self.out / "results.json").write_text(json.dumps(content, indent=1, default=str) + "\n")

    def log(self, title: str, text: str) -> None:
        """Append what a process has printed; of a long text its beginning and its end."""
        if len(text) > 2 * _KEPT_CHARS:
            text = f"{text[:_KEPT_CHARS]}\n... {len(text) - 2 * _KEPT_CHARS} characters ...\n{text[-_KEPT_CHARS:]}"
        with self._lock, (self.out / "log.txt").open("a") as file:
            file.write(f"==== {title}\n{text.rstrip()}\n\n")

    def table(self) -> str:
        """In Markdown: the visits, the steps, then the checks of each."""
        lines = ["# Visit", ""]
        for about in self.visits:
            place = ", ".join(about["gpus"]) or "no GPU: small sizes on the CPU, whose figures say nothing"
            commit = (about["git"] or {"commit": "unknown"})["commit"]
            lines.append(f"- {about['started']}, {place}, commit {commit}: `{about['command']}`")
        steps = [(f"{s.number} {s.title}", s.status, s.seconds, s.text) for s in self.steps]
        lines += _table("step", steps)
        for step in self.steps:
            checks = [(f.name, f"{f.status}, {f.date}", f.seconds, f.text) for f in step.findings.values()]
            lines += ["", f"## {step.number} {step.title}", *_table("check", checks)] if checks else []
        return "\n".join(lines) + "\n"


def _table(what: str, rows: list[tuple[str, str, float, str]]) -> list[str]:
    cells = [(what, "status", "s", "found"), *((name, status, f"{s:.0f}", text) for name, status, s, text in rows)]
    lines = [
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|")[:800] for cell in row) + " |" for row in cells
    ]
    return ["", lines[0], "|---|---|---|---|", *lines[1:]]
