"""Mode by mode: whether the machine is fit for it, and if not, which finding says why."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_cifar.doctor.findings import Finding
from lit_cifar.doctor.mode_table import ModeRow


@dataclass(frozen=True, kw_only=True)
class ModeVerdict:
    """About one mode.

    Attributes:
        mode: Its name.
        fit: Whether it can be trusted with a training here.
        reason: On what it runs, or why it should not.
        command: What starts it, or what mends the machine.
    """

    mode: str
    fit: bool
    reason: str
    command: str


def missing_from_torch(rows: Sequence[ModeRow]) -> list[Finding]:
    """One finding for each reason for which modes do not run at all."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.accelerator is None:
            reasons.setdefault(row.verdict.removeprefix("no: "), []).append(row.mode.name)
    return [
        Finding(
            part="machine",
            problem=f"{', '.join(names)} cannot run here: {reason}.",
            mend="pip install --upgrade torch torchvision",
            modes=tuple(names),
        )
        for reason, names in reasons.items()
    ]


def judge_modes(rows: Sequence[ModeRow], findings: Sequence[Finding]) -> list[ModeVerdict]:
    """A verdict for each row of the table of modes.

    Args:
        rows: From `mode_table`.
        findings: Everything that was found, also the reasons for which a mode does not run.
    """
    verdicts = []
    for row in rows:
        against = next((finding for finding in findings if row.mode.name in finding.modes), None)
        if against is None:
            verdict = ModeVerdict(mode=row.mode.name, fit=True, reason=row.verdict, command=row.command or "")
        else:
            verdict = ModeVerdict(mode=row.mode.name, fit=False, reason=against.problem, command=against.mend)
        verdicts.append(verdict)
    return verdicts
