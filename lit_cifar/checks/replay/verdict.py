"""The findings and counts of a replay, as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Part: TypeAlias = Literal[
    "data", "parameters", "local computation", "exchange", "reduction", "optimizer", "evaluation", "resume"
]
Outcome: TypeAlias = Literal["pass", "fail", "abstain", "error"]
COMPARED: tuple[str, ...] = ("batches", "samples", "outputs", "gradients", "buffers", "exchanges", "reduced")
COMPARED += ("steps", "states", "metrics")
_SHOWN = 5  # most findings that are shown
TAKEN = "taken as it is"  # the end of a note on what a replay follows without judging it


@dataclass(frozen=True)
class Finding:
    """A place where the run did not do what one device would."""

    part: Part
    step: int  # number of optimizer steps before it
    rank: int | None  # None for all ranks
    tensor: str
    text: str
    epoch: int | None = None  # stands in place of a step

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        when = f"step {self.step}" if self.epoch is None else f"epoch {self.epoch}"
        return f"{self.part}: {when}{rank}: {self.tensor} {self.text}"


@dataclass
class Report:
    """Report on a replay of some steps; or, with a `subject`, on an epoch or a checkpoint."""

    strategy: str
    num_ranks: int
    precision: str
    first_step: int
    subject: str = ""
    num_steps: int = 0  # number of steps that were judged
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # observations that are no mistakes
    abstained: list[str] = field(default_factory=list)  # reasons why something was not judged
    not_looked_at: list[str] = field(default_factory=list)  # subjects that this report tells nothing about
    error: str | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPARED, 0))
    largest_share: float = 0.0  # largest share of the bound that an averaged gradient takes
    seconds: float = 0.0
    mebibytes: float = 0.0  # size of the record on the disk

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def outcome(self) -> Outcome:
        """The outcome; a pass only if every part that was looked at was judged."""
        if self.error is not None:
            return "error"
        if self.findings:
            return "fail"
        return "abstain" if self.abstained or not any(self.counts.values()) else "pass"

    def lines(self) -> Iterator[str]:
        """A line for each part that was judged; then the first findings."""
        of = self.subject or f"replay of {self.num_steps} steps from step {self.first_step}"
        ranks = "1 process" if self.num_ranks == 1 else f"{self.num_ranks} processes"
        yield f"{of}, {self.strategy} on {ranks}, {self.precision}: {self.outcome.upper()}"
        yield from self._lines_of_subject() if self.subject else self._lines_of_steps()
        yield from (f"  note: {note}" for note in self.notes)
        yield from (f"  not judged: {reason}" for reason in self.abstained)
        yield from (f"  not looked at: {what}" for what in self.not_looked_at)
        first: dict[tuple[object, ...], Finding] = {}  # each once, at its first step
        for one in self.findings:
            first.setdefault((one.part, one.rank, one.tensor, one.text), one)
        yield from (f"  {finding}" for finding in [*first.values()][:_SHOWN])
        if len(first) > _SHOWN:
            yield f"  and {len(first) - _SHOWN} more findings"
        if self.error is not None:
            yield f"  {self.error}"

    def _lines_of_subject(self) -> Iterator[str]:
        if self.counts["states"]:
            yield f"  {self.counts['states']} tensors and settings, compared bit for bit"
            return
        metrics = f", {self.counts['metrics']} logged means" if self.counts["metrics"] else ""
        yield f"  {self.counts['samples']} samples{metrics}"

    def _lines_of_steps(self) -> Iterator[str]:
        counts = self.counts
        samples = f", {counts['samples']} samples" if counts["samples"] else ""
        yield f"  data               {counts['batches']} batches{samples}"
        yield (
            f"  local computation  {counts['outputs']} outputs, {counts['gradients']} gradients, "
            f"{counts['buffers']} buffers, compared bit for bit"
        )
        if counts["exchanges"]:
            yield f"  exchange           {counts['exchanges']} messages between ranks inside the steps"
        if counts["reduced"]:
            share = f"at most {self.largest_share:.2f} of the bound from their mean"
            if any(finding.part == "reduction" for finding in self.findings):
                share = "not all of them within the bound"
            yield f"  reduction          {counts['reduced']} gradients averaged over ranks, {share}"
        yield f"  optimizer          {counts['steps']} steps, {counts['states']} tensors, compared bit for bit"
        yield f"  cost               {self.seconds:.1f} s, {self.mebibytes:.0f} MiB on the disk for a moment"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"outcome": self.outcome}


def empty_report(trainer: Any, subject: str = "") -> Report:
    return Report(
        strategy=type(trainer.strategy).__name__,
        num_ranks=trainer.world_size,
        precision=str(trainer.precision),
        first_step=trainer.global_step,
        subject=subject,
    )
