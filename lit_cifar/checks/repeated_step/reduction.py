"""The bound between the mean of gradients over ranks and the exact mean: a theorem, for any order of the sum."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_cifar.checks.repeated_step.tensors import as_real


def gamma(num_roundings: int, dtype: torch.dtype) -> float:
    """N u / (1 - n u), u the unit roundoff: N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.1."""
    error = num_roundings * torch.finfo(dtype).eps / 2
    return error / (1 - error) if error < 1 else float("inf")


@dataclass
class ExactMean:
    """Sums gradients of ranks in float64; a missing gradient counts as zero."""

    num_ranks: int
    before: dict[str, Tensor] = field(default_factory=dict)  # gradients to which the mean is added, rounded once more
    totals: dict[str, Tensor] = field(default_factory=dict)
    magnitudes: dict[str, Tensor] = field(default_factory=dict)

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            exact = as_real(gradient).double()
            self.totals[name] = self.totals.get(name, 0.0) + exact
            self.magnitudes[name] = self.magnitudes.get(name, 0.0) + exact.abs()

    def compared(self, reduced: Mapping[str, Tensor]) -> tuple[float, float]:
        """The factor between `reduced` and the mean, in least squares, and the share of the norm that this leaves."""
        means = {name: self.totals[name] / self.num_ranks for name in reduced if name in self.totals}
        pairs = [(as_real(reduced[name]).double(), mean) for name, mean in means.items()]
        square = sum(float(mean.square().sum()) for _, mean in pairs) or 1.0
        factor = sum(float((value * mean).sum()) for value, mean in pairs) / square
        left = sum(float((value - factor * mean).square().sum()) for value, mean in pairs)
        return factor, (left / square) ** 0.5

    def share(self, name: str, reduced: Tensor, *, is_sum: bool = False) -> float:
        """The largest distance of an element from the mean, or from the sum, as a share of its bound.

        The bound is gamma_N of the gradient's precision times the mean of the magnitudes, because each addend is
        divided once and takes part in at most N - 1 additions; plus the same with gamma_N of float64, in which this
        mean is computed; plus the smallest normal number for each rounding, because results below it lose digits.
        """
        if name not in self.totals:
            return 0.0 if not reduced.any() else float("inf")
        reduced = as_real(reduced)
        relative = gamma(self.num_ranks, reduced.dtype) + gamma(self.num_ranks, torch.float64)
        divisor = 1 if is_sum else self.num_ranks
        bound, expected = relative * self.magnitudes[name] / divisor, self.totals[name] / divisor
        if name in self.before:
            expected = expected + as_real(self.before[name]).double()
            bound = bound + gamma(1, reduced.dtype) * reduced.double().abs()
        # Overflow on both sides is right: a GradScaler then skips the step.
        overflowed = ~reduced.isfinite() & ~expected.to(reduced.dtype).isfinite()
        distance = (reduced.double() - expected).abs().masked_fill(overflowed, 0.0)
        bound = bound.masked_fill(overflowed, 0.0)
        shares = distance / (bound + self.num_ranks * torch.finfo(reduced.dtype).tiny)
        return float("inf") if bool(shares.isnan().any()) else float(shares.max()) if shares.numel() else 0.0
