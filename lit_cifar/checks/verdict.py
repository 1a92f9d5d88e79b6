"""What a check says of one relation that must hold, and how it is printed."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

# "note": true, and often no mistake. "abstain": it could not be judged. "crash": a run ended by an error.
Outcome: TypeAlias = Literal["pass", "fail", "note", "abstain", "crash"]

_SHOWN = 20  # most differences of a verdict
NO_VERDICT = 3  # exit status where nothing is known to be wrong, but not all that ran could be compared


@dataclass
class Verdict:
    """What is said of a relation. Without differences a `looked_at` says what was compared."""

    relation: str
    outcome: Outcome
    text: str = ""
    looked_at: str = ""
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    may_be_cut: bool = False  # other samples in a step, or another number of steps, as where epochs were cut
    cut: str = ""  # what the runs were of the whole training
    paste: str = ""  # lines of a script with which it would be judged
    asked: list[str] = field(default_factory=list)  # relations of the command that say it

    @classmethod
    def by_findings(cls, relation: str, found: list[str], looked_at: str = "", cut: str = "") -> "Verdict":
        """A failure that says the first of what was found; a pass if there is nothing."""
        outcome: Outcome = "fail" if found else "pass"
        return cls(relation, outcome, "; ".join(found[:3]), looked_at, found[:_SHOWN], cut=cut)

    def __str__(self) -> str:
        said = (self.text or self.looked_at) + (f" ({self.cut})" if self.cut else "")
        return f"{self.outcome.upper():8}{self.relation:26} {self.seconds:5.1f} s  {said}"


def summary(verdicts: Iterable[Verdict]) -> str:
    """How often each outcome is among the verdicts."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    counted = (f"{counts[outcome]} {outcome}" for outcome in get_args(Outcome) if counts[outcome])
    return ", ".join(counted) or "nothing was judged"


def exit_status(outcomes: Iterable[Outcome]) -> int:
    """1 if anything fails; 0 if something was judged, and nothing ended by an error; else `NO_VERDICT`."""
    found = {*outcomes}
    if "fail" in found:
        return 1
    return 0 if found & {"pass", "note"} and "crash" not in found else NO_VERDICT


def at_most(limit: int, lines: Sequence[Any], *, more: str = "and {} more") -> list[str]:
    """The first of the lines, and below them the number of those that are left out."""
    left_out = len(lines) - limit
    return [*map(str, lines[:limit]), *([more.format(left_out)] if left_out > 0 else [])]
