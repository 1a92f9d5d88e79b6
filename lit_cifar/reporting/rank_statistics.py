"""The accuracy of a rank, its confidence interval, and whether it differs from that of the others beyond chance.

The inputs are integers, so sums over ranks are exact and every figure can be recomputed from `per_rank.csv`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class AccuracyCount:
    correct: int
    total: int

    def __str__(self) -> str:
        return f"{self.correct} of {self.total} right"

    def __add__(self, other: "AccuracyCount") -> "AccuracyCount":
        return AccuracyCount(self.correct + other.correct, self.total + other.total)

    @property
    def accuracy(self) -> float:
        """Fraction correct, from 0 to 1; nan without samples."""
        return self.correct / self.total if self.total else math.nan

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % score interval around the accuracy; (0, 1) without samples.

        It stays inside [0, 1] and keeps its level close to 0 and 1, where the textbook p +- z sqrt(p q / n) collapses.

        Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of the
        American Statistical Association 22 (1927), 209-212.
        """
        if not self.total:
            return 0.0, 1.0
        z2 = NormalDist().inv_cdf(0.975) ** 2
        center = self.correct + z2 / 2
        half = math.sqrt(z2 * (self.correct * (self.total - self.correct) / self.total + z2 / 4))
        return max(0.0, (center - half) / (self.total + z2)), min(1.0, (center + half) / (self.total + z2))


def pooled(counts: Iterable[AccuracyCount]) -> AccuracyCount:
    return sum(counts, start=AccuracyCount(0, 0))


def deviates(counts: Sequence[AccuracyCount], *, level: float = 0.01) -> list[bool]:
    """Whether each rank differs from the other ranks together by more than chance explains.

    Each rank is tested at `level / len(counts)` (Bonferroni). So equally good ranks raise a flag in at most a share
    `level` of all evaluations, however many ranks there are. The most extreme rank is flagged first, and the remaining
    ones are tested again without it: otherwise one bad rank would make the others look too good. Of two ranks both or
    none are flagged, as each is the other's only comparison; never ranks without samples, or all right or all wrong.
    """
    remaining = dict(enumerate(counts))
    while remaining:
        whole = pooled(remaining.values())
        log_chances = {rank: log_chance(count, whole) for rank, count in remaining.items()}
        least = min(log_chances.values())
        if least >= math.log(level / len(counts)):
            break
        remaining = {rank: count for rank, count in remaining.items() if not math.isclose(log_chances[rank], least)}
    return [rank not in remaining for rank in range(len(counts))]


def log_chance(part: AccuracyCount, whole: AccuracyCount) -> float:
    """Log-probability of a deviation at least as large as `part`'s if `part` were drawn blindly from `whole`.

    One model sorts the samples into right and wrong; which rank they fall to has no influence on that. A rank's
    number of correct samples then follows the hypergeometric distribution: this is Fisher's exact test of the rank
    against the remaining ranks. The tail on the side of the deviation counts twice.

    Source: R. A. Fisher, "The Design of Experiments" (1935), chapter II.
    """
    hits, marked = part.correct, whole.correct
    if hits * whole.total < marked * part.total:  # a part below average: the tail is as many wrong samples or more
        hits, marked = part.total - hits, whole.total - marked
    found = range(hits, min(marked, part.total) + 1)
    terms = [_log_binomial(marked, k) + _log_binomial(whole.total - marked, part.total - k) for k in found]
    largest = max(terms)
    tail = largest + math.log(sum(math.exp(term - largest) for term in terms))
    return min(0.0, math.log(2) + tail - _log_binomial(whole.total, part.total))


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
