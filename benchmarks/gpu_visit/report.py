"""What has been found, written down as soon as it is known: a table, everything as JSON, and one log."""

import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "time limit", "info"]
MAX_LOG_CHARS = 15_000_000
"""Of the log of a visit, so that it can be carried in small parcels."""

_HEAD_CHARS, _TAIL_CHARS = 60_000, 60_000  # of what one process has printed


@dataclass(frozen=True)
class Finding:
    """What came out of one check.

    Attributes:
        name: Of the check.
        status: "info" is neither good nor bad.
        text: In words.
        seconds: How long it took.
        figures: Numbers for those who draw them.
    """

    name: str
    status: Status
    text: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepReport:
    """A step and what it has found so far.

    Attributes:
        number: Place in the table.
        title: In words.
        begun: Whether it has.
        seconds: How long it took; 0 while it runs.
        findings: In the order in which they were made.
    """

    number: int
    title: str
    begun: bool = False
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    @property
    def status(self) -> str:
        """The worst of its findings."""
        if not self.findings:
            return "running" if self.begun else "no time left"
        found = {finding.status for finding in self.findings}
        return next((status for status in ("failed", "time limit") if status in found), "ok")

    @property
    def text(self) -> str:
        """What is wrong; where nothing is, what there is to say."""
        checks = [finding for finding in self.findings if finding.status != "info"]
        wrong = [finding for finding in checks if finding.status != "ok"]
        if wrong:
            details = "; ".join(f"{finding.name}: {finding.text[:160]}" for finding in wrong)
            return f"{len(wrong)} of {len(checks)} not right: {details}"
        return "; ".join([f"{len(checks)} checks", *(f.text for f in self.findings if f.status == "info")])


class Report:
    """The files of a visit: `summary.md`, `results.json` and `log.txt` in `out`.

    Args:
        out: Exists.
        steps: In the order of the table.
        about: What the visit is of: command, place.
    """

    def __init__(self, out: Path, steps: list[StepReport], *, about: dict[str, Any]) -> None:
        self.out = out
        self.steps = steps
        self.about = about
        self._lock = threading.Lock()
        self._log_chars = 0

    def write(self) -> None:
        """Replace table and results; called after every finding, as nobody knows which is the last."""
        with self._lock:
            (self.out / "summary.md").write_text(self.table())
            steps = [asdict(step) | {"status": step.status} for step in self.steps]
            content = {"about": self.about, "steps": steps}
            (self.out / "results.json").write_text(json.dumps(content, indent=1, default=str) + "\n")

    def log(self, title: str, text: str) -> None:
        """Append what a process has printed; of a long text its beginning and its end."""
        if len(text) > _HEAD_CHARS + _TAIL_CHARS:
            left_out = len(text) - _HEAD_CHARS - _TAIL_CHARS
            text = f"{text[:_HEAD_CHARS]}\n... {left_out} characters left out ...\n{text[-_TAIL_CHARS:]}"
        entry = f"==== {title}\n{text.rstrip()}\n\n"
        with self._lock:
            self._log_chars += len(entry)
            if self._log_chars <= MAX_LOG_CHARS:
                with (self.out / "log.txt").open("a") as file:
                    file.write(entry)

    def table(self) -> str:
        """In Markdown: the steps, then the checks of each."""
        lines = [f"{name}: {value}" for name, value in self.about.items()]
        lines += ["", *_rows("step", "status", "s", "found")]
        lines += [
            _row(f"{step.number} {step.title}", step.status, f"{step.seconds:.0f}", step.text) for step in self.steps
        ]
        for step in self.steps:
            if step.findings:
                lines += ["", f"## {step.number} {step.title}", "", *_rows("check", "status", "s", "found")]
                lines += [_row(f.name, f.status, f"{f.seconds:.0f}", f.text) for f in step.findings]
        return "\n".join(lines) + "\n"


def _rows(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|")[:600] for cell in cells) + " |"
