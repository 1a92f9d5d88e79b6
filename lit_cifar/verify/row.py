"""The result of a mode."""

from dataclasses import dataclass, field

from lit_cifar.verify.comparison import Bounds


@dataclass
class Row:
    """The result of a mode.

    Attributes:
        mode: Name of the mode.
        processes: Number of processes; None if the run failed before that was known.
        equals: The single-device computation that it was compared with.
        losses: The loss of the global batch, step by step.
        expected_losses: Those of the single-device computation.
        differences: The largest difference of each kind over all steps.
        tolerance: What each kind may differ by after the last step.
        counts: Right and seen samples of its evaluation.
        seconds: The duration of its run, without that of the reference.
        problems: What is wrong, the first step first; empty for a PASS.
    """

    mode: str
    equals: str
    processes: int | None = None
    losses: list[float] = field(default_factory=list)
    expected_losses: list[float] = field(default_factory=list)
    differences: Bounds = field(default_factory=dict)
    tolerance: Bounds = field(default_factory=dict)
    counts: tuple[int, int] | None = None
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems
