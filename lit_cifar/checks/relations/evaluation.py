"""An evaluation does not depend on how its samples are divided, on repetition, or on the number of processes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lit_cifar.checks.relations import draws
from lit_cifar.checks.relations.loaders import CUT, UNDIVIDED_EVALUATION
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import NotJudgedError, Runs, Verdict, difference, unused

NAME = "evaluation"
_ALL = 2**20  # samples of a batch of all
_NO_LOADER = "the evaluation reads no DataLoader of torch"


def evaluation(runs: Runs) -> Iterator[Verdict]:
    yield from _in_lightning(runs) if runs.own().is_lightning else _in_plain_pytorch(runs)


def _in_lightning(runs: Runs) -> Iterator[Verdict]:
    trace = runs.run(variants=True, most_epochs=1)[0]
    metrics = trace.metrics
    if not metrics:
        raise NotJudgedError("no validation: give the Trainer validation data and the module a validation_step")
    reason = UNDIVIDED_EVALUATION if UNDIVIDED_EVALUATION in trace.remarks else "" if trace.evaluates else _NO_LOADER
    own, *ways = ("as it is", "again") if reason else metrics
    found = [text for way in ways if (text := _apart(runs, metrics[own], metrics[way], f"validated {way}"))]
    looked_at = f"{', '.join(metrics[own])}: {', '.join(ways)}"
    yield from _judged(trace, found, looked_at)
    if reason:
        yield Verdict(f"{NAME} in other batches", "abstain", reason)
    for way, error in trace.failed.items():
        yield Verdict(f"{NAME} {way}", "note", f"ends by {error}", looked_at)
    one = runs.run(validate="weights")[0].metrics.get("as it is", {})
    asks = runs.own().own_ranks
    why = f"the script asks for {'one process' if asks == 1 else f'{asks} processes'}"
    for number in (2, 3):
        name = f"{NAME} on {number} ranks"
        try:
            traces = runs.run(validate="weights", ranks=number)
        except NotJudgedError as error:
            yield Verdict(name, "abstain", str(error))
            continue
        text = _apart(runs, one, traces[0].metrics.get("as it is", {}), f"validated by {number} processes")
        found = [text] if text else []
        verdict = Verdict(name, "fail" if found else "pass", text, ", ".join(one), found)
        yield (verdict if asks == number else unused(verdict, why))


def _in_plain_pytorch(runs: Runs) -> Iterator[Verdict]:
    """The training again, with other batches wherever no gradient is made."""
    own = runs.run(generators=True)[0]
    values = _results(own)
    if not values:
        raise NotJudgedError("report the results: relations.report(val_loss=...)")
    by_hand = "evaluation_batch" in own.asked
    if not by_hand and (UNDIVIDED_EVALUATION in own.remarks or not own.evaluates):
        reason = UNDIVIDED_EVALUATION if own.evaluates else f"{_NO_LOADER} in torch.no_grad()"
        raise NotJudgedError(f'{reason}: write relations.knob("evaluation_batch", N) for its samples')
    if by_hand and own.is_cut:
        raise NotJudgedError(CUT)
    found = []
    for way, size in (("in batches of 1", 1), ("in batches of 7", 7), ("as one batch", 0)):
        changes: dict[str, Any] = {"evaluation_batch": size}
        if by_hand:
            changes = {"knobs": (("evaluation_batch", size or _ALL),), "most_evaluated": _ALL}
        other = _results(runs.run(generators=True, **changes)[0])
        if text := _apart(runs, values, other, f"evaluated {way}"):
            found.append(text)
    yield from _judged(own, found, f"{', '.join(values)}: in batches of 1, 7, all")


def on_two_ranks(runs: Runs, one: Trace, two: Trace) -> Iterator[Verdict]:
    """Compare what a plain script reports on one process and on two, which have trained the same weights."""
    name, values = f"{NAME} on 2 ranks", _results(one)
    if not values:
        return
    text = _apart(runs, values, _results(two), "evaluated by 2 processes")
    if text and (one.is_cut or two.is_cut):
        yield Verdict(name, "abstain", CUT)
        return
    yield Verdict(name, "fail" if text else "pass", text, ", ".join(values), [text] if text else [])


def _judged(trace: Trace, found: list[str], looked_at: str) -> Iterator[Verdict]:
    """A failure by what was found; a note where an evaluation draws random numbers and differs, or its model draws."""
    part = ", without the end of the evaluation's data" if trace.is_cut else ""
    verdict = Verdict(NAME, "fail" if found else "pass", "; ".join(found[:3]), looked_at + part, found)
    if draws.IN_MODEL in trace.remarks:
        verdict = replace(verdict, outcome="note", text=": ".join(filter(None, (draws.IN_MODEL, verdict.text))))
    elif found and trace.remarks & {draws.IN_EVALUATION, *([] if trace.evaluates else [draws.BESIDE_EVALUATION])}:
        verdict = replace(verdict, outcome="note", text=f"{draws.IN_EVALUATION}: {verdict.text}")
    yield verdict
    if trace.left_out:
        text = f"{trace.left_out} samples are in no batch of an evaluation (drop_last)"
        yield Verdict(f"samples of {NAME}", "note", text)


def rescored(runs: Runs) -> Iterator[Verdict]:
    """A checkpoint has the results that were logged when it was written."""
    own = runs.own()
    if own.is_lightning:
        yield from _rescored_in_lightning(runs)
        return
    numbers = {name: value for _, values in own.logged for name, value in values.items()}
    pairs = [
        (name, again)
        for name in numbers
        if name.startswith("score") and (again := numbers.get(f"re{name.replace('score', 'scored', 1)}")) is not None
    ]
    if not pairs:
        text = "relations.report(score=...), and rescored=... of the model that is loaded from the file"
        yield Verdict("score of a file", "abstain", text)
        return
    for name, again in pairs:
        is_same = difference(numbers[name], again) <= runs.limit
        text = "" if is_same else f"{name} was {numbers[name]:.9g} when it was kept, and is {again:.9g}"
        yield Verdict("score of a file", "pass" if is_same else "fail", text, f"{len(pairs)} scores")


def _rescored_in_lightning(runs: Runs) -> Iterator[Verdict]:
    run = runs.run(record=True)[0]
    if not run.logged:
        yield Verdict("score of a file", "abstain", "no validation")
        return
    last = len(run.logged)
    file = runs.folder_of(record=True) / "0" / f"validated-{last}.ckpt"
    again = runs.run(validate=str(file))[0].metrics.get("as it is", {})
    history = [values for _, values in run.logged]
    found: list[str] = []
    notes: list[str] = []
    for name, value in again.items():
        if name not in history[-1] or difference(history[-1][name], value) <= runs.limit:
            continue
        text = f"{name} was logged as {history[-1][name]:.9g}, and is {value:.9g} where the checkpoint is validated"
        (notes if _is_running(name, history) else found).append(text)
    outcome: Any = "fail" if found else "note" if notes else "pass"
    why = "; ".join(found[:2]) or "; ".join(f"{text}: it is the best so far" for text in notes[:2])
    yield Verdict("score of a file", outcome, why, ", ".join(again), found)


def _is_running(name: str, history: list[dict[str, float]]) -> bool:
    """Whether a metric is the best of another until then, which a single evaluation cannot know."""
    own = [values.get(name) for values in history]
    for other in history[-1].keys() - {name}:
        series = [values.get(other, 0.0) for values in history]
        for best in (max, min):
            if own == [best(series[: end + 1]) for end in range(len(series))]:
                return True
    return False


def _results(trace: Trace) -> dict[str, float]:
    """Reported results by the evaluation and name."""
    return {name: value for name, value in trace.reported.items() if name.startswith("val")}


def _apart(runs: Runs, own: Mapping[str, float], other: Mapping[str, float], how: str) -> str:
    """In words, the result that differs most."""
    sizes = {name: difference(value, other.get(name)) for name, value in own.items()}
    name = max(sizes, key=lambda its: sizes[its], default="")
    if not name or sizes[name] <= runs.limit:
        return ""
    value = f"{other[name]:.9g}" if name in other else "missing"
    return f"{name} is {own[name]:.9g}, and {value} if {how}"
