"""All relations, in the order in which they are judged, and the judgement of a training by them."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch

from lit_cifar.checks.relations import evaluation, options, own_devices, ranks, remarks, told, trained, workers
from lit_cifar.checks.relations.accumulation import accumulation
from lit_cifar.checks.relations.crashes import elsewhere, is_final, remedy
from lit_cifar.checks.relations.evaluation import ALL, Evaluations
from lit_cifar.checks.relations.own_resume import resumed
from lit_cifar.checks.relations.plan import Limits, RunPlan, Target, Trace
from lit_cifar.checks.relations.purposes import Purposes
from lit_cifar.checks.relations.runs import METRIC, NotJudgedError, RunError, Runs
from lit_cifar.checks.verdict import Verdict
from lit_cifar.data.pictures import free_memory
from lit_cifar.data.workers import num_cores
from lit_cifar.errors import one_line
from lit_cifar.launch.forked import workers as workers_of

Relation: TypeAlias = Callable[[Runs], Iterator[Verdict]]
RELATIONS: dict[str, Relation] = {
    "resume": resumed,
    "evaluation": evaluation.evaluation,
    "score": evaluation.rescored,
    "ranks": ranks.ranks,
    "accumulation": accumulation,
    "epochs": workers.epochs,
    "workers": workers.workers,
    "often": options.validated_more_often,
    "scale": options.with_smaller_scale,
    "trained": trained.trained,
}

# Ways to run a training, of which the first without an error is taken: processes, torchrun's variables on one, float64.
_WAYS = [(*way, double) for way in ((1, False), (1, True), (2, False)) for double in (True, False)]
_FEWEST_STEPS = 4  # of an epoch, unless limits are set; in the first few clipping may hide a factor
_QUICK_S = 15.0  # of a script that does not train: it is tried in other ways
_MOST_RUNS = 2  # to learn what batches are for
# For trainings that take more than a part of the limit of a run, of which relations need some ten.
_SHORTER = {
    1 / 8: Limits(batches=3, steps=9, evaluated=6, undivided=2),
    1 / 4: Limits(batches=2, steps=4, evaluated=2, undivided=1),
    1 / 2: Limits(batches=2, steps=2, evaluated=2, undivided=1),
}


def judged(
    target: Target, relations: Mapping[str, Relation], *, limits: Limits, limit_s: float, **how: Any
) -> Iterator[Verdict]:
    """The verdicts of these relations, in their order, as soon as they are known; `how` as in a `RunPlan`."""
    folder = Path(tempfile.mkdtemp(prefix="relations-"))
    try:
        runs = Runs(target, RunPlan(limits=limits, **how), folder, limit_s=limit_s)
        for verdict in _said("run", _run_twice, runs):
            yield verdict
            if verdict.outcome not in ("pass", "note"):
                return
        own = runs.own()
        said: dict[tuple[str, str, str], list[str]] = {}  # two relations may look at the same
        # Several relations at once. Some train on two ranks; long runs, which may be too late, then have a core each.
        cores = num_cores() // (2 if own.seconds > limit_s / 10 else 1)
        most = 1 if runs.plan.on_own_devices or own.has_port else min(cores, free_memory() // (2 * own.peak))
        with workers_of(max(1, most)) as pool:
            judgements = pool.map(lambda name: [*_said(name, relations[name], runs)], relations)
            for name, verdicts in zip(relations, judgements, strict=True):
                for verdict in verdicts:
                    asked = said.setdefault((verdict.relation, verdict.outcome, verdict.text), [])
                    asked.append(name)
                    if len(asked) == 1:
                        yield replace(verdict, cut=verdict.cut or ", ".join(own.cuts), asked=asked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _said(name: str, relation: Relation, runs: Runs) -> Iterator[Verdict]:
    """The verdicts of a relation, each with its seconds; also of one that gives up, or ends by an error of its own."""
    started = perf_counter()
    try:
        for verdict in relation(runs):
            yield replace(verdict, seconds=perf_counter() - started)
            started = perf_counter()
    except NotJudgedError as error:
        yield Verdict(name, "abstain", str(error), seconds=perf_counter() - started, paste=error.paste)
    except Exception as error:  # a mistake of the relation, which must not hide what the others say
        yield Verdict(name, "crash", f"{type(error).__name__}: {one_line(error)}")


def _first(runs: Runs, limits: Limits) -> Trace:
    """The first run, which is like all later ones.

    It is cut short if it is slow and the reader has set no limits. If it ends by an error, it may count on all batches.
    """
    runs.plan = replace(runs.plan, limits=limits, purposes=())
    for part, shorter in _SHORTER.items() if limits == Limits() else ():
        if not runs.takes(part):
            break
        runs.plan = replace(runs.plan, limits=shorter)
    _learn_purposes(runs)
    if any(trace.end.error and (trace.reading.cut or trace.part(Evaluations).cut) for trace in runs.ended()):
        whole = runs.with_limits(batches=ALL, evaluated=ALL, undivided=ALL)
        _learn_purposes(whole)
        if not any(trace.end.error for trace in whole.ended()):
            runs.plan = whole.plan
    return runs.own()


def _learn_purposes(runs: Runs) -> None:
    """Let the common plan say what batches are for, where runs have mistaken it; each run may show more."""
    for _ in range(_MOST_RUNS):
        known = dict(runs.plan.purposes) | dict(runs.ended()[0].part(Purposes).mistaken)
        runs.plan = replace(runs.plan, purposes=tuple(known.items()))


def _found_way(runs: Runs) -> str:
    """Change the common plan to the first way to run the script that trains without an error; say what it is like."""
    is_own, limits = runs.plan.on_own_devices, runs.plan.limits
    errors: list[RunError] = []
    said: list[str] = []
    untrained: list[RunPlan] = []
    for place in ("",) if is_own else ("", "with the CPU in place of CUDA"):
        by_way: dict[tuple[int, bool, bool], str] = {}
        for number, torchrun, double in [way for way in _WAYS if not (is_own and way[-1])]:
            runs.plan = replace(runs.plan, double=double, torchrun=torchrun, ranks=number, without_gpu=bool(place))
            started = perf_counter()
            try:
                own = _first(runs, limits)
            except RunError as error:
                errors.append(error)
                by_way[number, torchrun, double] = str(error)
                if (error.end.is_late and not double) or is_final(error.end):
                    raise _with_remedies(str(error), runs, errors) from None
                continue
            if not own.norms and not own.part(trained.Observed).backwards:  # perhaps it only says how to start it
                untrained.append(runs.plan)
                by_way[number, torchrun, double] = "no step of an optimizer was seen"
                if perf_counter() - started < _QUICK_S:
                    continue
                return ""
            data = f"on made samples in place of {', '.join(own.made_data)}" if own.made_data else ""
            precision = "" if double or is_own else f"in float32: with float64 {by_way[number, torchrun, True]}"
            alone = f"on {number} processes: on one {by_way[1, False, False]}" if number > 1 else ""
            return "".join(f", {each}" for each in (data, place, precision, alone) if each)
        as_started, by_torchrun = by_way[1, False, False], by_way[1, True, False]
        also = f"; with torchrun's variables: {by_torchrun}" if by_torchrun != as_started else ""
        said.append(f"{place}{place and ': '}{as_started}{also}")
        if not any(error.end.wants_cuda for error in errors):
            break
    if untrained:
        runs.plan = untrained[0]
        return ""
    raise _with_remedies("; ".join(said), runs, errors)


def _with_remedies(said: str, runs: Runs, errors: Sequence[RunError]) -> RunError:
    """The error of a training that runs in no way, with what to do about it."""
    ends = [error.end for error in errors]
    words = [said] if ends[-1].is_late else [said, remedy(ends[-1], runs.target)]
    if any(end.wants_data for end in ends):
        words.append("--fake-data makes samples in place of the data set")
    if any(end.wants_cuda for end in ends) and not runs.plan.on_own_devices and torch.cuda.is_available():
        words.append("--gpu runs it on its own devices")
    return RunError("; ".join(words), ends[-1])


def _run_twice(runs: Runs) -> Iterator[Verdict]:
    """Run the training twice, in the first way in which it runs."""
    try:
        how = _found_way(runs)
    except RunError as error:
        yield Verdict("run", "crash", str(error))
        return
    runs.plan = runs.with_limits(batches=_in_windows(runs.own(), runs.plan.limits)).plan
    own = runs.own()
    if still := trained.nothing_changes(own):
        yield Verdict("run", "fail", still)
        return
    if runs.plan.on_own_devices:
        how = f", {own_devices.measure(runs)}{how}"
    twice = runs.own(repetition=1)
    differing = [each.name for each in runs.differences(own.state, twice.state)]
    metrics = {name.removeprefix(METRIC) for name in differing if name.startswith(METRIC)}
    runs.unsteady = metrics | told.apart(own, twice, runs.limit)
    again = runs.judge("run", own, twice)
    if again.outcome == "fail":
        raise NotJudgedError(f"two runs of the script differ, so that nothing can be compared: {again.text}")
    but = f" but for {', '.join(sorted(runs.unsteady))}" if runs.unsteady else ""
    by_hand = f", {remarks.BY_HAND}" if remarks.BY_HAND in own.remarks else ""
    same = "" if runs.plan.on_own_devices else ", twice the same"
    yield replace(again, looked_at=f"{again.looked_at}{by_hand}{same}{but}{how}")
    if own.end.outside:
        yield Verdict("files", "note", elsewhere(own.end, runs.target))


def _in_windows(own: Trace, limits: Limits) -> int:
    """About so many batches: an epoch that is cut ends inside a window if the script's own does, and as far inside."""
    window, lengths = own.script.window, own.reading.lengths
    if lengths and not own.reading.cut:
        return limits.batches
    fewest = _FEWEST_STEPS if limits == Limits() else 2
    rest = own.reading.cut_from % window if len(lengths) == 1 else 0  # with several loaders, whole windows
    return window * max(fewest, -(-limits.batches // window)) - (window - rest if rest else 0)
