"""What a check says of one relation that must hold, and how it is printed."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

# "note": true, and often no mistake. "abstain": it could not be judged. "crash": a run ended by an error.
Outcome: TypeAlias = Literal["pass", "fail", "note", "abstain", "crash"]


@dataclass
class Verdict:
    """What is said of a relation. Without differences a `looked_at` says what was compared."""

    relation: str
    outcome: Outcome
    text: str = ""
    looked_at: str = ""
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    has_other_samples: bool = False  # in a step

    def __str__(self) -> str:
        said = self.text or self.looked_at
        return f"{self.outcome.upper():8}{self.relation:26} {self.seconds:5.1f} s  {said}"


def summary(verdicts: Iterable[Verdict]) -> str:
    """How often each outcome is among the verdicts."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    counted = (f"{counts[outcome]} {outcome}" for outcome in get_args(Outcome) if counts[outcome])
    return ", ".join(counted) or "nothing was judged"
