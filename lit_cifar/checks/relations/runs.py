"""Starts runs of the training, each plan once, and compares what they have made."""

import os
import pickle
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from lit_cifar.checks.relations.parts import BESIDE
from lit_cifar.checks.relations.plan import Imposed, Plan, Target, Trace
from lit_cifar.checks.tensors import as_real
from lit_cifar.launch.forked import ForkedRun

Outcome: TypeAlias = Literal["pass", "fail", "note", "abstain", "crash"]
# In float64, right twins differ by 1e-9 or less, mistakes by 1e-3 and more; in float32 by rounding that steps amplify.
_LIMITS = {True: 1e-7, False: 1e-3}
# Numbers that count calls or steps of a kind that a relation changes by right.
COUNTERS = ("num_batches_tracked", "._step_count", "n_averaged")
_KINDS = ("weights", "buffers", "optimizer", "settings", "schedule", "kept")
_TINY = 1e-12
_SHOWN = 20  # most differences of a verdict


@dataclass
class Verdict:
    """What a relation says. Without differences a `looked_at` says what was compared."""

    relation: str
    outcome: Outcome
    text: str = ""
    looked_at: str = ""
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    has_other_samples: bool = False  # in a step


@dataclass(frozen=True)
class Difference:
    name: str
    size: float  # the largest difference, relative to the largest value; infinite where there is nothing to compare

    def __str__(self) -> str:
        return f"{self.name} (is only in one)" if self.size == float("inf") else f"{self.name} ({self.size:.2g})"


class NotJudgedError(Exception):
    """A relation cannot be judged, for this reason."""


class RunError(NotJudgedError):
    """A run ended by an error."""


class RunTimeoutError(NotJudgedError):
    """A run did not end in time."""


class Runs:
    """Runs of one training. `plan` is what all of them have in common."""

    def __init__(self, target: Target, plan: Plan, folder: Path, *, limit_s: float) -> None:
        self.target, self.plan, self.folder, self.limit_s = target, plan, folder, limit_s
        self.unsteady: list[str] = []  # metrics that two equal runs do not share, such as images per second
        self.wants_cuda = False  # whether a run that ended by an error has named CUDA
        self._made: dict[Plan, list[Trace]] = {}
        self._folders: dict[Plan, Path] = {}

    def run(self, **changes: Any) -> list[Trace]:
        """What each rank of a run with these changes to the common plan has written. An error raises a `RunError`."""
        plan = replace(self.plan, **changes)
        if plan not in self._made:
            self._made[plan] = self._start(plan)
        failed = [trace for trace in self._made[plan] if trace.error]
        for trace in sorted(failed, key=lambda trace: trace.ended_at or float("inf")):  # others end when one has failed
            where = f" on {plan.ranks} processes" if plan.ranks > 1 else ""
            kind = RunTimeoutError if trace.is_late else RunError
            refused = f" ({trace.outside[0]} is outside of its folder)" if trace.outside else ""
            self.wants_cuda |= trace.wants_cuda
            raise kind(f"a run{where} ended by {trace.error[:200]}{refused}")
        return self._made[plan]

    def own(self) -> Trace:
        """Rank 0 of the training as the script has it, on one process."""
        return self.run()[0]

    def folder_of(self, **changes: Any) -> Path:
        self.run(**changes)
        return self._folders[replace(self.plan, **changes)]

    def imposed(self, of: dict[str, Any], **how: int) -> Imposed:
        """The recorded batches of the run with the changes `of`."""
        lengths = tuple(self.run(**of)[0].lengths.items())
        return Imposed(folder=str(self.folder_of(**of)), lengths=lengths, **how)

    def _start(self, plan: Plan) -> list[Trace]:
        folder = self._folders[plan] = self.folder / f"run-{len(self._folders)}"
        for rank in range(plan.ranks):
            (folder / str(rank)).mkdir(parents=True)
        (folder / "plan").write_bytes(pickle.dumps((self.target, plan)))
        paths = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
        environment["OMP_NUM_THREADS"] = "1"  # more would add up in another order from run to run
        if plan.torchrun:
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        output = folder / "output"
        started = ForkedRun(
            [str(folder / "plan")],
            module="lit_cifar.checks.relations.child",
            environment=environment,
            stdout=output,
            stderr=output,
            num_ranks=plan.ranks,
        )
        try:
            status = started.wait(self.limit_s)
        finally:
            started.kill()
        return [self._read(folder, rank, status) for rank in range(plan.ranks)]

    def _read(self, folder: Path, rank: int, status: int | None) -> Trace:
        with suppress(FileNotFoundError):
            trace: Trace = pickle.loads((folder / str(rank) / "trace").read_bytes())
            if trace.error.startswith("SystemExit"):
                trace.error = f"{trace.error}: {_end_of(folder / 'output')}"
            return trace
        if status is None:
            remedy = "pass a higher --limit, or make the training smaller"
            return Trace(error=f"a limit of {self.limit_s:.0f} s: {remedy}", is_late=True)
        return Trace(error=f"exit status {status}, without a result: {_end_of(folder / 'output')}")

    # Comparisons
    @property
    def limit(self) -> float:
        """The largest difference between two ways to make one training, relative to the largest value of a tensor."""
        return _LIMITS[self.plan.double]

    def differences(
        self,
        one: dict[str, Any],
        other: dict[str, Any],
        *,
        kinds: Sequence[str] = _KINDS,
        leave_out: Sequence[str] = (),
    ) -> list[Difference]:
        """Those above the limit: weights first, and the largest of a kind first."""
        names = [name for name in {**one, **other} if name.split("/")[0] in kinds and not name.endswith(COUNTERS)]
        both = one.keys() & other.keys()
        left = [name for name in names if not name.startswith((*leave_out, *self.unsteady))]
        left = [name for name in left if name in both or not name.startswith(BESIDE)]  # called in one of them alone
        found = [Difference(name, difference(one.get(name), other.get(name))) for name in left]
        above = [each for each in found if each.size > self.limit]
        return sorted(above, key=lambda each: (_KINDS.index(each.name.split("/")[0]), -each.size))

    def judge(
        self, relation: str, one: Trace, other: Trace, *, samples: bool = True, said: str = "", **which: Sequence[str]
    ) -> Verdict:
        """Compare states, `which` as in `differences`, numbers of steps, and with `samples` those of each step."""
        apart = self.differences(one.state, other.state, **which)
        found = [str(each) for each in apart]
        if len(one.norms) != len(other.norms):
            found.insert(0, f"one has {len(one.norms)} steps, the other {len(other.norms)}")
        if others := other_samples(one.samples, other.samples) if samples else "":
            found.insert(0, others)
        num_samples = sum(map(len, one.samples))
        looked_at = f"{len(one.norms)} steps, {num_samples} samples, {len(one.state)} tensors and numbers"
        if not one.state or not one.norms:
            return Verdict(relation, "abstain", "no step of an optimizer was seen")
        if not found:
            return Verdict(relation, "pass", looked_at=looked_at)
        if len(found) == len(apart) and all(is_own_number(each.name, one.state) for each in apart):
            text = f"{said}{found[0]}; {len(found)} such numbers differ, and nothing that is trained"
            return Verdict(relation, "note", text, looked_at, found[:_SHOWN])
        since = first_apart(one.norms, other.norms, self.limit)
        when = "" if since is None else f"; parameters differ since step {since}"
        text = f"{said}{found[0]}{when}; {len(found)} differ"
        return Verdict(relation, "fail", text, looked_at, found[:_SHOWN], has_other_samples=bool(others))


def is_own_number(name: str, state: dict[str, Any]) -> bool:
    """Whether it is a number that a module or callback holds beside its parameters, such as a counter for its log."""
    return name.startswith(("kept/module.", "kept/callback ")) and not isinstance(state.get(name), torch.Tensor)


def _end_of(output: Path) -> str:
    """The last two lines that a run has printed."""
    lines = output.read_text(errors="replace").strip().splitlines() if output.exists() else []
    return " ".join(" ".join(lines[-2:]).split())


def difference(one: Any, other: Any) -> float:
    if one is None or other is None:
        return float("inf")
    first, second = (as_real(torch.as_tensor(value)).double() for value in (one, other))
    if first.shape != second.shape:
        return float("inf")
    if not first.numel() or torch.equal(first, second):
        return 0.0
    if bool((first.isfinite() != second.isfinite()).any()):
        return float("inf")
    first, second = first[first.isfinite()], second[second.isfinite()]
    largest = float(torch.stack([first.abs().max(), second.abs().max()]).max()) if first.numel() else 0.0
    return float((first - second).abs().max()) / largest if largest > _TINY else 0.0


def other_samples(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> str:
    """In words, the first step that was made of other samples."""
    for step, (first, second) in enumerate(zip(one, other, strict=False)):
        if first and second and (apart := (Counter(first) - Counter(second)).total()):
            return f"step {step} has other samples: {apart} of {len(first)}"
    return ""


def first_apart(one: Sequence[float], other: Sequence[float], limit: float) -> int | None:
    """The first step after which the norms of the parameters differ."""
    pairs = enumerate(zip(one, other, strict=False), start=1)
    return next((step for step, (a, b) in pairs if abs(a - b) > limit * max(abs(a), abs(b), _TINY)), None)


def unused(verdict: Verdict, why: str) -> Verdict:
    """The verdict; a note where it would be a failure in a setting that the script does not use, if `why` says so."""
    if verdict.outcome != "fail" or not why:
        return verdict
    return replace(verdict, outcome="note", text=f"{why}; it would not hold: {verdict.text}")
