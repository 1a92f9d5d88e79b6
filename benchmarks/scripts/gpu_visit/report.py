"""What has been found, written down as soon as it is known: a table, everything as JSON, and one log."""

import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "time limit"]
_KEPT_CHARS = 30_000  # at the beginning and at the end of what one process has printed


@dataclass(frozen=True)
class Finding:
    """What came out of one check."""

    name: str
    status: Status
    text: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepReport:
    """A step and what it has found so far."""

    number: int
    title: str
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    @property
    def status(self) -> str:
        """The worst of its findings."""
        found = {finding.status for finding in self.findings} or {"no time left"}
        return next((status for status in ("failed", "time limit", "no time left") if status in found), "ok")

    @property
    def text(self) -> str:
        wrong = [f"{f.name}: {f.text[:160]}" for f in self.findings if f.status != "ok"]
        total = len(self.findings)
        return f"{len(wrong)} of {total} not right: {'; '.join(wrong)}" if wrong else f"{total} checks"


class Report:
    """The files of a visit: `summary.md`, `results.json` and `log.txt` in `out`.

    Args:
        out: Exists.
        steps: In the order of the table.
        about: What the visit is of: command, time.
    """

    def __init__(self, out: Path, steps: list[StepReport], *, about: dict[str, Any]) -> None:
        self.out = out
        self.steps = steps
        self.about = about
        self._lock = threading.Lock()

    def write(self) -> None:
        """Replace table and results; called after every finding, as nobody knows which is the last."""
        with self._lock:
            (self.out / "summary.md").write_text(self.table())
            steps = [asdict(step) | {"status": step.status} for step in self.steps]
            content = self.about | {"steps": steps}
            (self.out / "results.json").write_text(json.dumps(content, indent=1, default=str) + "\n")

    def log(self, title: str, text: str) -> None:
        """Append what a process has printed; of a long text its beginning and its end."""
        if len(text) > 2 * _KEPT_CHARS:
            text = f"{text[:_KEPT_CHARS]}\n... {len(text) - 2 * _KEPT_CHARS} characters ...\n{text[-_KEPT_CHARS:]}"
        with self._lock, (self.out / "log.txt").open("a") as file:
            file.write(f"==== {title}\n{text.rstrip()}\n\n")

    def table(self) -> str:
        """In Markdown: the steps, then the checks of each."""
        lines = [f"{name}: {value}" for name, value in self.about.items() if isinstance(value, str)]
        steps = [(f"{step.number} {step.title}", step.status, step.seconds, step.text) for step in self.steps]
        lines += _table("step", steps)
        for step in self.steps:
            checks = [(f.name, f.status, f.seconds, f.text) for f in step.findings]
            lines += ["", f"## {step.number} {step.title}", *_table("check", checks)] if checks else []
        return "\n".join(lines) + "\n"


def _table(what: str, rows: list[tuple[str, str, float, str]]) -> list[str]:
    cells = [(what, "status", "s", "found"), *((name, status, f"{s:.0f}", text) for name, status, s, text in rows)]
    lines = [
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|")[:600] for cell in row) + " |" for row in cells
    ]
    return ["", lines[0], "|---|---|---|---|", *lines[1:]]
