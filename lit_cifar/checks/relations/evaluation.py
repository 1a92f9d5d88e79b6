"""An evaluation does not depend on how its samples are divided, or on the number of processes; and that of a file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lit_cifar.checks.compare import Difference, difference
from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import NotJudgedError, Runs, first_apart, unused
from lit_cifar.checks.relations.told import apart, by_time, results
from lit_cifar.checks.verdict import Verdict

NAME = "evaluation"
TOLD = 1e-6  # relative difference of numbers that may have been rounded
VALIDATED = "validated.ckpt"  # in the folder of the process
CUT = "an evaluation has more batches than were read: pass a higher --batches"
_ALL = 2**20  # samples of a batch of all
_TRAINS_OTHERWISE = "with other batches wherever no gradient is made, it trains other weights"
_NO_LOADER = "the evaluation reads no DataLoader of torch"
# With Lightning, ways to validate the same weights, and the sizes of their batches; 0 for all samples.
AS_IT_IS, _AGAIN = "as it is", "again"
WAYS: dict[str, int | None] = {
    AS_IT_IS: None,
    _AGAIN: None,
    "in batches of 1": 1,
    "in batches of 7": 7,
    "as one batch": 0,
}


@dataclass(frozen=True)
class EvaluateInBatches:
    """Asks a run to read other batches wherever no gradient is made."""

    size: int  # samples; 0 for all


@dataclass(frozen=True)
class ValidateInManyWays:
    """Asks Lightning's Trainer to validate in all `WAYS` after the training."""


@dataclass(frozen=True)
class Validate:
    """Asks Lightning's Trainer to validate in place of training."""

    checkpoint: str | None = None  # None for the weights as they are made


@dataclass(frozen=True)
class KeepValidated:
    """Asks Lightning's Trainer for a checkpoint after each validation, of which the last stays."""


@dataclass
class Evaluations:
    """What a process writes down."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)  # of each way to validate
    failed: dict[str, str] = field(default_factory=dict)  # errors of ways to validate
    has_loader: bool = False  # a loader was read where no gradient is made
    left_out: int = 0  # samples that no batch of an evaluation on one process had
    cut: str = ""  # how much of an evaluation was read, if it had more batches


def evaluation(runs: Runs) -> Iterator[Verdict]:
    yield from _in_lightning(runs) if runs.own().script.is_lightning else _in_plain_pytorch(runs)


def _in_lightning(runs: Runs) -> Iterator[Verdict]:
    limits = replace(runs.plan.limits, epochs=1)
    trace = runs.run(asks=ValidateInManyWays(), limits=limits)[0]
    seen = trace.part(Evaluations)
    metrics = seen.metrics
    if not metrics:
        raise NotJudgedError("no validation: give the Trainer validation data and the module a validation_step")
    reason = _why_not_in_other_batches(trace)
    own, *ways = (AS_IT_IS, _AGAIN) if reason else metrics
    found = [text for way in ways if (text := _apart(runs, metrics[own], metrics[way], f"validated {way}"))]
    looked_at = f"{', '.join(metrics[own])}: {', '.join(ways)}"
    yield from _judged(trace, found, looked_at)
    if reason:
        yield Verdict(f"{NAME} in other batches", "abstain", reason)
    for way, error in seen.failed.items():
        yield Verdict(f"{NAME} {way}", "note", f"ends by {error}", looked_at)
    one = validated(runs)
    asks = runs.own().script.ranks
    why = f"the script asks for {'one process' if asks == 1 else f'{asks} processes'}"
    for number in (2, 3):
        name = f"{NAME} on {number} ranks"
        try:
            several = validated(runs, ranks=number)
        except NotJudgedError as error:
            yield Verdict(name, "abstain", str(error))
            continue
        text = _apart(runs, one, several, f"validated by {number} processes")
        found = [text] if text else []
        verdict = Verdict(name, "fail" if found else "pass", text, ", ".join(one), found, cut=seen.cut)
        yield (verdict if asks == number else unused(verdict, why))


def _in_plain_pytorch(runs: Runs) -> Iterator[Verdict]:
    """The training again, with other batches wherever no gradient is made."""
    own = runs.run(seeded_by_step=True)[0]
    if not _results(runs, own):
        raise NotJudgedError("no result of an evaluation is told", "relations.report(loss=loss)")
    by_hand = "evaluation_batch" in own.script.calls
    if not by_hand and (reason := _why_not_in_other_batches(own)):
        where = " in torch.no_grad()" if reason == _NO_LOADER else ""
        raise NotJudgedError(f"{reason}{where}", 'batch = relations.knob("evaluation_batch", batch)  # its samples')
    if by_hand and own.part(Evaluations).cut:
        raise NotJudgedError(CUT)
    found = []
    for way, size in (("in batches of 1", 1), ("in batches of 7", 7), ("as one batch", 0)):
        changes: dict[str, Any] = {"asks": EvaluateInBatches(size)}
        if by_hand:
            limits = replace(runs.plan.limits, evaluated=_ALL)
            changes = {"knobs": (("evaluation_batch", size or _ALL),), "limits": limits}
        changes["seeded_by_step"] = True
        other = runs.run(**changes)[0]
        if first_apart(own.norms, other.norms, runs.limit) is not None:
            raise NotJudgedError(_TRAINS_OTHERWISE)
        if _unlike(runs, own, other):  # perhaps by the clock, which was the same in two runs by chance
            runs.unsteady |= apart(other, runs.run(repetition=1, **changes)[0], runs.limit)
        found += [_in_words(each, f"evaluated {way}") for each in _unlike(runs, own, other)[:1]]
    yield from _judged(own, found, f"{_names(runs, own)}: in batches of 1, 7, all")


def validated(runs: Runs, checkpoint: str | None = None, *, ranks: int | None = None) -> dict[str, float]:
    """What Lightning's Trainer says of a checkpoint, or of the weights as they are made."""
    ranks = runs.plan.ranks if ranks is None else ranks
    trace = runs.run(asks=Validate(checkpoint), ranks=ranks)[0]
    return trace.part(Evaluations).metrics.get(AS_IT_IS, {})


def _why_not_in_other_batches(trace: Trace) -> str:
    if not trace.part(Evaluations).has_loader:
        return _NO_LOADER
    return remarks.UNDIVIDED_EVALUATION if remarks.UNDIVIDED_EVALUATION in trace.remarks else ""


def on_two_ranks(runs: Runs, alone: dict[str, Any], two: Trace) -> Iterator[Verdict]:
    """Compare what a plain script tells on one process and on two, which have trained the same weights."""
    name, one, how = f"{NAME} on 2 ranks", runs.run(**alone)[0], "evaluated by 2 processes"
    if not _results(runs, one):
        return
    found = _unlike(runs, one, two)
    if found and any(trace.part(Evaluations).cut for trace in (one, two)):
        yield Verdict(name, "abstain", CUT)
        return
    looked_at = _names(runs, one)
    if not found:
        yield Verdict(name, "pass", looked_at=looked_at)
        return
    # A number may be of the training, which rank 0 tells of its own part: no other evaluation changes it.
    less = _results(runs, runs.run(**alone, limits=replace(runs.plan.limits, evaluated=1))[0])
    of_evaluation = [each for each in found if each.name.startswith("val") or less.get(each.name) != each.one]
    text = _in_words((of_evaluation or found)[0], how)
    yield Verdict(name, "fail" if of_evaluation else "note", text, looked_at, [text])


def _judged(trace: Trace, found: list[str], looked_at: str) -> Iterator[Verdict]:
    """A failure by what was found; a note where an evaluation draws random numbers and differs, or its model draws."""
    seen = trace.part(Evaluations)
    verdict = Verdict(NAME, "fail" if found else "pass", "; ".join(found[:3]), looked_at, found, cut=seen.cut)
    drawn = {remarks.IN_EVALUATION, *([] if seen.has_loader else [remarks.BESIDE_EVALUATION])}
    if remarks.IN_MODEL in trace.remarks:
        verdict = replace(verdict, outcome="note", text=": ".join(filter(None, (remarks.IN_MODEL, verdict.text))))
    elif found and trace.remarks & drawn:
        verdict = replace(verdict, outcome="note", text=f"{remarks.IN_EVALUATION}: {verdict.text}")
    yield verdict
    if seen.left_out:
        text = f"{seen.left_out} samples are in no batch of an evaluation (drop_last)"
        yield Verdict(f"samples of {NAME}", "note", text)


def _results(runs: Runs, trace: Trace) -> dict[str, float]:
    """Results by their names and steps, but for those that two equal runs do not share."""
    return by_time(trace, without=runs.unsteady)


def _names(runs: Runs, trace: Trace) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in results(trace) if name not in runs.unsteady))


def _apart(runs: Runs, own: Mapping[str, float], other: Mapping[str, float], how: str) -> str:
    """In words, the result that differs most."""
    worst = runs.apart(own, other, own)[:1]
    return _in_words(worst[0], how) if worst else ""


def _in_words(worst: Difference, how: str) -> str:
    value = "missing" if worst.other is None else f"{worst.other:.9g}"
    return f"{worst.name} is {worst.one:.9g}, and {value} if {how}"


def _unlike(runs: Runs, one: Trace, other: Trace) -> list[Difference]:
    """Results of a plain script that differ, the largest difference first; both runs need not tell all of them."""
    values, others = _results(runs, one), _results(runs, other)
    names = values.keys() & others.keys() or values.keys()
    return runs.apart(values, others, names, least=TOLD)


def rescored(runs: Runs) -> Iterator[Verdict]:
    """Validate the last checkpoint by a new process; for a script with calls, compare what it reports."""
    own = runs.own()
    if own.script.is_lightning:
        yield from _rescored_in_lightning(runs)
        return
    numbers = {name: value for _, values in own.logged for name, value in values.items()}
    pairs = [
        (name, again)
        for name in numbers
        if name.startswith("score") and (again := numbers.get(f"re{name.replace('score', 'scored', 1)}")) is not None
    ]
    if not pairs:
        paste = "relations.report(score=best)  # when it is saved; rescored=... of what is loaded from its file"
        yield Verdict("score of a file", "abstain", "no score of a file is reported", paste=paste)
        return
    for name, again in pairs:
        is_same = difference(numbers[name], again) <= runs.limit
        text = "" if is_same else f"{name} was {numbers[name]:.9g} when it was kept, and is {again:.9g}"
        yield Verdict("score of a file", "pass" if is_same else "fail", text, f"{len(pairs)} scores")


def _rescored_in_lightning(runs: Runs) -> Iterator[Verdict]:
    run = runs.run(asks=KeepValidated())[0]
    if not run.logged:
        yield Verdict("score of a file", "abstain", "no validation")
        return
    file = runs.folder_of(asks=KeepValidated()) / "0" / VALIDATED
    again = validated(runs, str(file))
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
