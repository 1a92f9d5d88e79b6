"""Starts runs of the training, each plan once, and compares what they have made."""

import math
import os
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from typing import Any, TypeAlias

import torch

from lit_cifar.checks.compare import Difference, difference, differences
from lit_cifar.checks.relations.crashes import in_words
from lit_cifar.checks.relations.mirror import MIRROR, folders_of, mirror, mirrored
from lit_cifar.checks.relations.parts import BESIDE, UNSAVED
from lit_cifar.checks.relations.plan import End, GoOn, Imposed, RunPlan, Target, Trace
from lit_cifar.checks.verdict import Verdict
from lit_cifar.launch.forked import EndedRun, run

# In float64, right twins differ by 1e-9 or less, mistakes by 1e-3 and more; in float32 by rounding that steps amplify.
_LIMITS = {True: 1e-7, False: 1e-3}
_FACTOR = 10.0  # on its own devices, times the difference of equal runs: that is the largest of three, and not of all
LARGEST = 0.02  # a difference of equal runs in which a mistake could hide
# Numbers that count calls or steps of a kind that a relation changes by right.
_COUNTERS = ("num_batches_tracked", "._step_count", "n_averaged")
_KINDS = ("weights", "buffers", "optimizer", "settings", "schedule", "kept")
TRAINED = _KINDS[:3]
METRIC = "kept/metric."  # begins the names of Lightning's
# What a process of a run imports before the script.
_PRELOAD = ("lit_cifar.checks.relations.in_lightning", "lit_cifar.checks.relations.loaders")
State: TypeAlias = Mapping[Any, Any]  # tensors and numbers by name


class NotJudgedError(Exception):
    """A relation cannot be judged, for this reason; `paste` has the lines of a script with which it could."""

    def __init__(self, reason: str, paste: str = "") -> None:
        super().__init__(reason)
        self.paste = paste


class RunError(NotJudgedError):
    """A run ended by an error, or was not at its end in time."""

    def __init__(self, reason: str, end: End) -> None:
        super().__init__(reason)
        self.end = end


class Runs:
    """Runs of one training, which several threads may ask for. `plan` is what all of them have in common."""

    def __init__(self, target: Target, plan: RunPlan, folder: Path, *, limit_s: float) -> None:
        self.target, self.plan, self.folder, self.limit_s = target, plan, folder, limit_s
        self.unsteady: set[str] = set()  # numbers that two equal runs do not share, such as images per second
        # On the script's own devices: by name, the largest difference of equal runs, and the last digit of a 1.
        self.spread: dict[Hashable, float] = {}
        self.digit = 0.0
        self._made: dict[RunPlan, list[Trace]] = {}
        self._locks: dict[RunPlan, Lock] = {}
        self._first = self  # of all that are `planned` from it

    def run(self, **changes: Any) -> list[Trace]:
        """What each rank of a run with these changes to the common plan has written. An error raises a `RunError`."""
        traces = self.ended(**changes)
        if failed := [trace.end for trace in traces if trace.end.error]:
            first = min(failed, key=lambda end: end.at or math.inf)  # others end when one has failed
            raise RunError(in_words(first, self.target, len(traces)), first)
        return traces

    def ended(self, **changes: Any) -> list[Trace]:
        """As `run`, also where it ended by an error."""
        plan = self._plan(changes)
        with self._locks.setdefault(plan, Lock()):
            if plan not in self._made:
                self._made[plan] = self._start(plan)
        return self._made[plan]

    def takes(self, part: float) -> bool:
        """Whether the training takes more than this part of the limit of a run: it is then ended, and forgotten."""
        most_s = self.limit_s * part
        slow = any(trace.seconds > most_s for trace in self.ended(most_s=most_s))
        if slow:
            del self._made[self.plan]
        return slow

    def own(self, **changes: Any) -> Trace:
        """Rank 0 of a run with these changes: without any, of the training as the script has it."""
        return self.run(**changes)[0]

    def planned(self, **changes: Any) -> "Runs":
        """The same runs with these changes to the common plan."""
        other = copy(self)
        other.plan = replace(self.plan, **changes)
        return other

    def with_limits(self, **limits: int) -> "Runs":
        return self.planned(limits=replace(self.plan.limits, **limits))

    def _plan(self, changes: dict[str, Any]) -> RunPlan:
        """The common plan with these changes. A knob that the script does not call is given by its flag."""
        plan = replace(self.plan, **changes)
        if not plan.knobs:
            return plan
        flags = self._first.own().script.by_flag
        by_flag = {name: flags[name].given(value) for name, value in plan.knobs if name in flags}
        called = tuple((name, value) for name, value in plan.knobs if name not in by_flag)
        return replace(plan, knobs=called, arguments=(*plan.arguments, *chain(*by_flag.values())))

    def imposed(self, **how: int) -> Imposed:
        """The batches of this training."""
        own = self.own(record=True)
        return Imposed(folder=str(own.folder.parent), lengths=tuple(own.reading.lengths.items()), **how)

    def _start(self, plan: RunPlan) -> list[Trace]:
        folder = Path(mkdtemp(prefix="run-", dir=self.folder))
        for rank in range(plan.ranks):
            (folder / str(rank)).mkdir(parents=True)
        place, own, program = folder / MIRROR, Path(self.target.folder), self.target.program
        if (go_on := plan.asked(GoOn)) and go_on.files:  # with links and times, by which a script may find the newest
            shutil.copytree(Path(go_on.checkpoint, MIRROR), place, symlinks=True)
        else:
            mirror(place, folders_of(self.target))
        if Path(program).is_absolute():
            program = str(mirrored(place, Path(program)))
        target = replace(self.target, program=program, folder=str(mirrored(place, own)))
        (folder / "plan").write_bytes(pickle.dumps((target, plan)))
        imports = (str(mirrored(place, Path(entry))) for entry in filter(None, sys.path))
        variables = {"PYTHONPATH": os.pathsep.join(imports), "GIT_OPTIONAL_LOCKS": "0"}  # else git writes to read
        if not plan.on_own_devices:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        if plan.torchrun:
            variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        ended = run(
            [str(folder / "plan")],
            module="lit_cifar.checks.relations.child",
            folder=folder,
            limit_s=self.limit_s,
            num_ranks=plan.ranks,
            threads=1,  # more would add up in another order from run to run
            variables=variables,
            preload=_PRELOAD,
        )
        return [self._read(folder / str(rank), ended) for rank in range(plan.ranks)]

    def _read(self, folder: Path, ended: EndedRun) -> Trace:
        trace = Trace()
        if (file := folder / "trace").exists():
            trace = torch.load(file, mmap=True, weights_only=False)  # of large models there would be no room for all
            trace.end.words = _last_lines(ended)
            if "SystemExit" in trace.end.kinds:
                trace.end.error += f": {trace.end.words}"
        elif ended.status is None:
            remedy = "pass a higher --limit, or make the training smaller"
            trace.end = End(error=f"a limit of {self.limit_s:.0f} s: {remedy}", is_late=True)
        else:
            trace.end = End(error=f"exit status {ended.status}, without a result: {_last_lines(ended)}")
        trace.folder = folder
        return trace

    @property
    def limit(self) -> float:
        """The largest difference between two ways to make one training, relative to the largest value of a tensor."""
        return max(_LIMITS[self.plan.double], 2 * self.digit)

    def limit_of(self, name: Hashable) -> float:
        """The limit for this tensor or result; infinite where equal runs differ too much."""
        spread = self.spread.get(name, 0.0)
        return math.inf if spread > LARGEST else max(self.limit, _FACTOR * spread)

    def apart(self, one: State, other: State, names: Iterable[Any], *, least: float = 0.0) -> list[Difference]:
        """Differences above their limits, and the `least` of all, of what has these names; the largest first."""
        found = differences(one, other, names=names)
        return [each for each in found if each.size > max(least, self.limit_of(each.name))]

    def differences(
        self, one: State, other: State, *, kinds: Sequence[str] = _KINDS, leave_out: Sequence[str] = ()
    ) -> list[Difference]:
        """Those above the limit: weights first, and the largest of a kind first."""
        names = [name for name in {**one, **other} if _kind_of(name) in kinds and not name.endswith(_COUNTERS)]
        both = one.keys() & other.keys()
        unsteady = {f"{kind}{name}" for name in self.unsteady for kind in ("kept/", METRIC)}
        left = [name for name in names if not name.startswith(tuple(leave_out)) and name not in unsteady]
        left = [name for name in left if name in both or not name.startswith(BESIDE)]  # called in one of them alone
        return sorted(self.apart(one, other, left), key=lambda each: _KINDS.index(_kind_of(each.name)))

    def judge(
        self, relation: str, one: Trace, other: Trace, *, samples: bool = True, said: str = "", **which: Sequence[str]
    ) -> Verdict:
        """Compare states, `which` as in `differences`, numbers of steps, and with `samples` those of each step."""
        if not one.state or not one.norms:
            return Verdict(relation, "abstain", "no step of an optimizer was seen")
        apart = self.differences(one.state, other.state, **which)
        others = other_samples(one.samples, other.samples) if samples else ""
        steps = [len(trace.norms) for trace in (one, other)]
        of_steps = f"one has {steps[0]} steps, the other {steps[1]}" if steps[0] != steps[1] else ""
        found = [*filter(None, (others, of_steps)), *map(str, apart)]
        looked_at = f"{steps[0]} steps, {sum(map(len, one.samples))} samples, {len(one.state)} tensors and numbers"
        verdict = Verdict.by_findings(relation, found, looked_at)
        if not found:
            return verdict
        if len(found) == len(apart) and all(_is_own_number(each.name, one.state) for each in apart):
            text = f"{said}{found[0]}; {len(found)} such numbers differ, and nothing that is trained"
            return replace(verdict, outcome="note", text=text)
        since = first_apart(one.norms, other.norms, self.limit)
        when = "" if since is None else f"; parameters differ since step {since}"
        more = f"; {len(found)} tensors and numbers differ" if len(found) > 1 else ""
        return replace(verdict, text=f"{said}{found[0]}{when}{more}", may_be_cut=bool(others or of_steps))


def _kind_of(name: str) -> str:
    return name.partition("/")[0]


def _is_own_number(name: str, state: State) -> bool:
    """Whether it is a number that a module or callback holds beside its parameters, or a buffer that is never saved."""
    is_beside = name.startswith(("kept/module.", "kept/callback "))
    return name.startswith(UNSAVED) or (is_beside and not isinstance(state.get(name), torch.Tensor))


def _last_lines(ended: EndedRun) -> str:
    """The last two lines that a run has printed, errors before anything else."""
    lines = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
    return " ".join(" ".join(lines[-2:]).split())


def other_samples(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> str:
    """In words, the first step that was made of other samples."""
    for step, (first, second) in enumerate(zip(one, other, strict=False)):
        if first and second and (apart := (Counter(first) - Counter(second)).total()):
            return f"step {step} has other samples: {apart} of {len(first)}"
    return ""


def are_same_samples(one: list[list[int]], other: list[list[int]]) -> bool:
    """Whether steps are made of the same samples, which all are known."""
    sizes, others = ([*map(len, steps)] for steps in (one, other))
    return all(sizes) and sizes == others != [] and not other_samples(one, other)


def first_apart(one: Sequence[float], other: Sequence[float], limit: float) -> int | None:
    """The first step after which the norms of the parameters differ."""
    pairs = enumerate(zip(one, other, strict=False), start=1)
    return next((step for step, (a, b) in pairs if difference(a, b) > limit), None)


def unused(verdict: Verdict, why: str) -> Verdict:
    """The verdict; a note where it would be a failure in a setting that the script does not use, if `why` says so."""
    if verdict.outcome != "fail" or not why:
        return verdict
    return replace(verdict, outcome="note", text=f"{why}; it would not hold: {verdict.text}")
