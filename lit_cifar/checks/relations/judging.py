"""All relations, in the order in which they are judged, and the judgement of a training by them."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import torch

from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.accumulation import accumulation
from lit_cifar.checks.relations.crashes import elsewhere
from lit_cifar.checks.relations.evaluation import evaluation, rescored
from lit_cifar.checks.relations.made_data import Made
from lit_cifar.checks.relations.options import validated_more_often, with_smaller_scale
from lit_cifar.checks.relations.own_devices import measure
from lit_cifar.checks.relations.own_resume import resumed
from lit_cifar.checks.relations.plan import Limits, RunPlan, Target, Trace
from lit_cifar.checks.relations.ranks import ranks
from lit_cifar.checks.relations.runs import METRIC, NotJudgedError, RunError, Runs
from lit_cifar.checks.relations.told import apart
from lit_cifar.checks.relations.trained import nothing_changes, trained
from lit_cifar.checks.relations.workers import epochs, workers
from lit_cifar.checks.verdict import Verdict
from lit_cifar.errors import one_line

Relation: TypeAlias = Callable[[Runs], Iterator[Verdict]]
RELATIONS: dict[str, Relation] = {
    "resume": resumed,
    "evaluation": evaluation,
    "score": rescored,
    "ranks": ranks,
    "accumulation": accumulation,
    "epochs": epochs,
    "workers": workers,
    "often": validated_more_often,
    "scale": with_smaller_scale,
    "trained": trained,
}

# Ways to run a training, of which the first that ends without an error is taken: in float64, with torchrun's variables
# on one process too, on so many processes.
_WAYS = (
    *((double, torchrun, 1) for double in (True, False) for torchrun in (False, True)),
    *((double, False, 2) for double in (True, False)),
)


def judged(
    target: Target,
    relations: Mapping[str, Relation],
    *,
    limits: Limits,
    limit_s: float,
    made_data: bool = False,
    on_own_devices: bool = False,
) -> Iterator[Verdict]:
    """The verdicts of these relations, each as soon as it is known."""
    folder = Path(tempfile.mkdtemp(prefix="relations-"))
    try:
        plan = RunPlan(limits=limits, made_data=made_data, on_own_devices=on_own_devices)
        runs = Runs(target, plan, folder, limit_s=limit_s)
        started = perf_counter()
        for verdict in _run_twice(runs):
            yield replace(verdict, seconds=perf_counter() - started)
            if verdict.outcome not in ("pass", "note"):
                return
        cut = ", ".join(runs.own().cuts)
        said: dict[tuple[str, str, str], list[str]] = {}  # two relations may look at the same
        for name, relation in relations.items():
            started = perf_counter()
            for verdict in _said(name, relation, runs):
                asked = said.setdefault((verdict.relation, verdict.outcome, verdict.text), [])
                asked.append(name)
                if len(asked) == 1:
                    yield replace(verdict, seconds=perf_counter() - started, cut=verdict.cut or cut, asked=asked)
                started = perf_counter()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _found_way(runs: Runs) -> str:
    """Change the common plan to the first way to run the training that ends without an error; say what it is like."""
    said = []
    is_own = runs.plan.on_own_devices
    for without_gpu in (False,) if is_own else (False, True):
        errors: dict[tuple[bool, bool, int], str] = {}
        place = "with the CPU in place of CUDA" if without_gpu else ""
        for double, torchrun, number in [way for way in _WAYS if not (is_own and way[0])]:
            runs.plan = replace(runs.plan, double=double, torchrun=torchrun, ranks=number, without_gpu=without_gpu)
            try:
                runs.own()
            except RunError as error:
                errors[double, torchrun, number] = str(error)
                if error.is_final:
                    raise RunError(f"{error}; {error.remedy}") from None
                remedy = error.remedy
                continue
            precision = "" if double or is_own else f"in float32: with float64 {errors[True, torchrun, number]}"
            alone = f"on {number} processes: on one {errors[False, False, 1]}" if number > 1 else ""
            names = runs.own().part(Made).names
            data = f"on made samples in place of {', '.join(names)}" if names else ""
            return "".join(f", {each}" for each in (data, place, precision, alone) if each)
        as_started, by_torchrun = errors[False, False, 1], errors[False, True, 1]
        also = f"; with torchrun's variables: {by_torchrun}" if by_torchrun != as_started else ""
        said.append(f"{place}{place and ': '}{as_started}{also}")
        if not runs.wants_cuda:
            break
    raise RunError("; ".join([*said, remedy]))


def _run_twice(runs: Runs) -> Iterator[Verdict]:
    """Run the training twice. Change the common plan if it cannot compute in float64, or needs torchrun's variables."""
    try:
        how = _found_way(runs)
    except NotJudgedError as error:
        remedy = "; --fake-data makes samples in place of the data set" if runs.wants_data else ""
        if runs.wants_cuda and not runs.plan.on_own_devices and torch.cuda.is_available():
            remedy += "; --gpu runs it on its own devices"
        yield Verdict("run", "crash", f"{error}{remedy}")
        return
    own = runs.own()
    if (batches := _in_windows(own, runs.plan.limits.batches)) != runs.plan.limits.batches:
        runs.plan = runs.with_limits(batches=batches).plan
        own = runs.own()
    if verdict := nothing_changes(own):
        yield verdict
        return
    if runs.plan.on_own_devices:
        try:
            how = f", {measure(runs)}{how}"
        except NotJudgedError as error:
            yield Verdict("run", "abstain", str(error))
            return
    twice = runs.run(repetition=1)[0]
    differing = [each.name.partition("/")[2] for each in runs.differences(own.state, twice.state)]
    metrics = {name.removeprefix(METRIC) for name in differing if name.startswith(METRIC)}
    runs.unsteady = metrics | apart(own, twice, runs.limit)
    again = runs.judge("run", own, twice)
    if again.outcome == "fail":
        text = f"two runs of the script differ, so that nothing can be compared: {again.text}"
        yield replace(again, outcome="abstain", text=text)
        return
    but = f" but for {', '.join(sorted(runs.unsteady))}" if runs.unsteady else ""
    by_hand = f", {remarks.BY_HAND}" if remarks.BY_HAND in own.remarks else ""
    same = "" if runs.plan.on_own_devices else ", twice the same"
    yield replace(again, looked_at=f"{again.looked_at}{by_hand}{same}{but}{how}")
    if own.end.outside:
        yield Verdict("files", "note", elsewhere(own.end, runs.target))


def _in_windows(own: Trace, batches: int) -> int:
    """About so many batches: an epoch that is cut ends inside a window if the script's own does, and as far inside."""
    window, lengths = own.script.window, own.reading.lengths
    if lengths and not own.reading.cut:
        return batches
    rest = own.reading.cut_from % window if len(lengths) == 1 else 0  # with several loaders, whole windows
    return window * max(2, -(-batches // window)) - (window - rest if rest else 0)


def _said(name: str, relation: Relation, runs: Runs) -> Iterator[Verdict]:
    try:
        yield from relation(runs)
    except NotJudgedError as error:
        yield Verdict(name, "abstain", str(error), paste=error.paste)
    except Exception as error:  # a mistake of the relation, which must not hide what the others say
        yield Verdict(name, "crash", f"{type(error).__name__}: {one_line(error)}")
