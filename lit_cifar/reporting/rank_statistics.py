"""The accuracy of a rank and its confidence interval.

The inputs are integers, so sums over ranks are exact and every figure can be recomputed from `per_rank.csv`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class AccuracyCount:
    correct: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.total:
            raise ValueError(f"not a count: {self.correct} correct of {self.total}")

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
