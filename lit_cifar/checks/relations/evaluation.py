"""An evaluation does not depend on how its samples are divided, or on the number of processes; and that of a file."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lit_cifar.checks.compare import Difference
from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import NotJudgedError, RunError, Runs, first_apart, unused
from lit_cifar.checks.relations.told import Told, apart, results
from lit_cifar.checks.verdict import Verdict

NAME = "evaluation"
_TOLD = 1e-6  # relative difference of numbers that may have been rounded
_ROUNDED = 1.5  # of the last digit: what may be printed of one number in two runs
VALIDATED = "validated.ckpt"  # in the folder of the process
CUT = "an evaluation has more batches than were read: pass a higher --batches"
ALL = 2**20  # samples of a batch of all
_NO_LOADER = "the evaluation reads no DataLoader of torch in torch.no_grad()"
_IN_BATCHES = {"in batches of 1": 1, "in batches of 7": 7, "as one batch": 0}  # samples; 0 for all
# With Lightning, ways to validate the same weights, and the sizes of their batches.
AS_IT_IS, _AGAIN = "as it is", "again"
WAYS: dict[str, int | None] = {AS_IT_IS: None, _AGAIN: None, **_IN_BATCHES}
# What runs are asked for: to wait in their first evaluations, which changes no result but those of a clock; to let
# Lightning's Trainer validate in all `WAYS` after the training, or keep a checkpoint of the last validation.
EVALUATE_SLOWLY, VALIDATE_IN_MANY_WAYS, KEEP_VALIDATED = "slowly", "in many ways", "keep validated"


@dataclass(frozen=True)
class Validate:
    """Asks Lightning's Trainer to validate in place of training."""

    checkpoint: str | None = None  # None for the weights as they are made


@dataclass
class Evaluations:
    """What a process writes down."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)  # of each way to validate
    failed: dict[str, str] = field(default_factory=dict)  # errors of ways to validate
    has_loader: bool = False  # a loader was read where no gradient is made
    calls: int = 0  # of models, to evaluate
    rest: int = 0  # samples of a last batch of fewer
    left_out: int = 0  # samples that no batch of an evaluation on one process had
    cut: str = ""  # how much of an evaluation was read, if it had more batches


def evaluation(runs: Runs) -> Iterator[Verdict]:
    """Validate in many ways after the training; a plain script trains again, with other batches without gradients."""
    if runs.own().script.is_lightning:
        yield from _in_lightning(runs)
        return
    runs = runs.planned(seeded_by_step=True)
    own = runs.own()
    if not results(own, runs.unsteady) and own.end.at_limit:  # it may evaluate behind its last epoch alone
        runs = runs.planned(to_evaluation=True)
        with suppress(RunError):  # as of a mean of no batch
            own = runs.own()
    if not results(own, runs.unsteady):
        raise NotJudgedError("no result of an evaluation is told", "relations.report(loss=loss)")
    reason = _why_not_in_other_batches(own)
    # Where the script divides its data, and they are more than was read, batches of its loader are divided.
    is_called = "evaluation_batch" in own.script.calls and not own.part(Evaluations).cut
    by_hand = "evaluation_batch" in own.script.knobs if reason else is_called
    if reason and not by_hand:
        raise NotJudgedError(reason, 'batch = relations.knob("evaluation_batch", batch)  # its samples')
    if by_hand and own.part(Evaluations).cut:
        raise NotJudgedError(CUT)
    found, failed, judged = [], [], []
    for way, size in _IN_BATCHES.items():
        others = runs.planned(evaluation_batch=size)
        if by_hand:
            unlimited = runs.with_limits(evaluated=ALL, undivided=ALL)
            others = unlimited.planned(knobs=(("evaluation_batch", size or ALL),))
        try:
            other = others.own()
        except RunError as error:
            failed.append(Verdict(f"{NAME} {way}", "note", str(error)))
            if error.end.is_late or len(failed) == len(_IN_BATCHES):
                raise
            continue
        if first_apart(own.norms, other.norms, runs.limit) is not None:
            raise NotJudgedError("with other batches wherever no gradient is made, it trains other weights")
        if results(own, runs.unsteady).keys().isdisjoint(results(other, runs.unsteady)):
            raise NotJudgedError(f"no result is told both as it is and {way}")
        if by_hand and size == 1 and other.part(Evaluations).calls == own.part(Evaluations).calls:
            raise NotJudgedError("what says how many samples are evaluated at once changes nothing")
        judged.append(way)
        found += [_in_words(each, f"evaluated {way}") for each in _unlike(runs, own, other)[:1]]
    counts = "most other batches end it by an error, so that it may count on their size" * (len(failed) > len(judged))
    if not own.part(Evaluations).rest and all(text.endswith(" of 7") for text in found):
        counts = counts or "each batch has as many samples, which it may count on"
    verdict, *of_samples = _judged(own, found, f"{_names(runs, own)}: {', '.join(judged)}")
    yield from (unused(verdict, counts), *of_samples, *failed)


def _in_lightning(runs: Runs) -> Iterator[Verdict]:
    trace = runs.with_limits(epochs=1).own(asks=VALIDATE_IN_MANY_WAYS)
    seen = trace.part(Evaluations)
    metrics = seen.metrics
    if not metrics:
        raise NotJudgedError("no validation: give the Trainer validation data and the module a validation_step")
    reason = _why_not_in_other_batches(trace)
    own, *ways = (AS_IT_IS, _AGAIN) if reason else metrics
    found = [text for way in ways for text in _worst(runs, metrics[own], metrics[way], f"validated {way}")]
    yield from _judged(trace, found, f"{', '.join(metrics[own])}: {', '.join(ways)}")
    if reason:
        yield Verdict(f"{NAME} in other batches", "abstain", reason)
    yield from (Verdict(f"{NAME} {way}", "note", f"ends by {error}") for way, error in seen.failed.items())
    one = validated(runs)
    asks = trace.script.ranks
    for number in range(2, 1 + min(3, runs.plan.limits.evaluated)):
        name = f"{NAME} on {number} ranks"
        try:
            several = validated(runs.planned(ranks=number))
        except NotJudgedError as error:
            yield Verdict(name, "abstain", str(error))
            continue
        found = _worst(runs, one, several, f"validated by {number} processes")
        verdict = Verdict.by_findings(name, found, ", ".join(one), seen.cut)
        why = f"the script asks for {'one process' if asks == 1 else f'{asks} processes'}"
        yield unused(verdict, why if asks != number else "")


def validated(runs: Runs, checkpoint: str | None = None) -> dict[str, float]:
    """What Lightning's Trainer says of a checkpoint, or of the weights as they are made."""
    return runs.own(asks=Validate(checkpoint)).part(Evaluations).metrics.get(AS_IT_IS, {})


def _why_not_in_other_batches(trace: Trace) -> str:
    if not trace.part(Evaluations).has_loader:
        return _NO_LOADER
    return next((why for why in (remarks.UNDIVIDED_EVALUATION, remarks.OF_OWN_SIZE) if why in trace.remarks), "")


def on_two_ranks(alone: Runs, two: Trace) -> Iterator[Verdict]:
    """Compare what a plain script tells on one process and on two, which have trained the same weights."""
    name = f"{NAME} on 2 ranks"
    one = alone.own()
    if results(one, alone.unsteady).keys().isdisjoint(results(two, alone.unsteady)):
        return
    found = _unlike(alone, one, two)
    if found and any(trace.part(Evaluations).cut for trace in (one, two)):
        yield Verdict(name, "abstain", CUT)
        return
    # A number may be of the training, which rank 0 tells of its own part: no other evaluation changes it.
    less = results(alone.with_limits(evaluated=1, undivided=1).own(), alone.unsteady) if found else {}
    sure = [each for each in found if each.name.name.startswith("val") or less.get(each.name) != each.one]
    said = [_in_words(each, "evaluated by 2 processes") for each in (sure or found)[:1]]
    verdict = Verdict.by_findings(name, said, _names(alone, one))
    yield replace(verdict, outcome="note") if found and (not sure or remarks.FIRST_BATCHES in one.remarks) else verdict


def _judged(trace: Trace, found: list[str], looked_at: str) -> Iterator[Verdict]:
    """A failure by what was found; a note where an evaluation draws random numbers and differs, or its model draws."""
    seen = trace.part(Evaluations)
    verdict = Verdict.by_findings(NAME, found, looked_at, seen.cut)
    drawn = {remarks.IN_EVALUATION, *([] if seen.has_loader else [remarks.BESIDE_EVALUATION])}
    if remarks.IN_MODEL in trace.remarks:
        verdict = replace(verdict, outcome="note", text=": ".join(filter(None, (remarks.IN_MODEL, verdict.text))))
    elif found and (reasons := trace.remarks & {*drawn, remarks.REFRESHED, remarks.FIRST_BATCHES, remarks.ONE_SAMPLE}):
        why = "; ".join(sorted(reasons - {remarks.BESIDE_EVALUATION} or {remarks.IN_EVALUATION}))
        verdict = replace(verdict, outcome="note", text=f"{why}: {verdict.text}")
    yield verdict
    if seen.left_out:
        text = f"{seen.left_out} samples are in no batch of an evaluation (drop_last)"
        yield Verdict(f"samples of {NAME}", "note", text)


def _names(runs: Runs, trace: Trace) -> str:
    return ", ".join(dict.fromkeys(at.name for at in results(trace, runs.unsteady)))


def _worst(runs: Runs, own: Mapping[str, float], other: Mapping[str, float], how: str) -> list[str]:
    """In words, the result that differs most, if any does."""
    return [_in_words(each, how) for each in runs.apart(own, other, own)[:1]]


def _in_words(worst: Difference, how: str) -> str:
    value = "missing" if worst.other is None else f"{worst.other:.9g}"
    return f"{worst.name} is {worst.one:.9g}, and {value} if {how}"


def _unlike(runs: Runs, one: Trace, other: Trace) -> list[Difference]:
    """Results of a plain script that differ, the largest difference first; both runs need not tell all of them."""
    found = _apart(runs, one, other)
    if found:  # perhaps by the clock
        runs.unsteady = runs.unsteady | apart(runs.own(), runs.own(asks=EVALUATE_SLOWLY), runs.limit)
        found = _apart(runs, one, other)
    return found


def _apart(runs: Runs, one: Trace, other: Trace) -> list[Difference]:
    values, others = results(one, runs.unsteady), results(other, runs.unsteady)
    digits = one.part(Told).digits | other.part(Told).digits
    found = runs.apart(values, others, values.keys() & others.keys(), least=_TOLD)
    return [each for each in found if abs(each.one - each.other) > _ROUNDED * digits.get(each.name.name, 0.0)]


def rescored(runs: Runs) -> Iterator[Verdict]:
    """Validate the last checkpoint by a new process; for a script with calls, compare what it reports."""
    own = runs.own()
    if own.script.is_lightning:
        yield _rescored_in_lightning(runs)
        return
    numbers = {name: value for _, values in own.logged for name, value in values.items()}
    scores = {name: name.replace("score", "rescored", 1) for name in numbers if name.startswith("score")}
    again = {name: numbers[other] for name, other in scores.items() if other in numbers}
    if not again:
        paste = "relations.report(score=best)  # when it is saved; rescored=... of what is loaded from its file"
        raise NotJudgedError("no score of a file is reported", paste)
    apart = runs.apart(numbers, again, again)
    found = [f"{each.name} was {each.one:.9g} when it was kept, and is {each.other:.9g}" for each in apart]
    yield Verdict.by_findings("score of a file", found, f"{len(again)} scores")


def _rescored_in_lightning(runs: Runs) -> Verdict:
    run = runs.own(asks=KEEP_VALIDATED)
    if not run.logged:
        raise NotJudgedError("no validation")
    again = validated(runs, str(run.folder / VALIDATED))
    history = [values for _, values in run.logged]
    apart = runs.apart(history[-1], again, history[-1].keys() & again.keys())
    running = [each for each in apart if _is_running(each.name, history)]
    where = "where the checkpoint is validated"
    found = [f"{each.name} was logged as {each.one:.9g}, and is {each.other:.9g} {where}" for each in apart]
    verdict = Verdict.by_findings("score of a file", found, ", ".join(again))
    return unused(verdict, "the best so far is logged" if len(running) == len(apart) else "")


def _is_running(name: str, history: list[dict[str, float]]) -> bool:
    """Whether a metric is the best of another until then, which a single evaluation cannot know."""
    own = [values.get(name) for values in history]
    for other in history[-1].keys() - {name}:
        series = [values.get(other, 0.0) for values in history]
        if any(own == [best(series[: end + 1]) for end in range(len(series))] for best in (max, min)):
            return True
    return False
