"""Two processes with half of a batch each train what one process trains; so do microbatches."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lit_cifar.checks.relations.draws import IN_STEP
from lit_cifar.checks.relations.evaluation import on_two_ranks
from lit_cifar.checks.relations.generators import OF_BATCH, ROUNDED
from lit_cifar.checks.relations.loaders import UNDIVIDED
from lit_cifar.checks.relations.loading import same_orders
from lit_cifar.checks.relations.parts import PARTS
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import Difference, NotJudgedError, Runs, Verdict, difference, other_samples, unused

_NO_LOADER = "it reads no DataLoader of torch"
_LEFT_OUT = ("kept/metric", "kept/val", "kept/loss", "kept/train")
_REPORTED = 1e-6  # relative: of numbers that may have been rounded for print
_FEWEST_WINDOWS = 2  # of microbatches
_MOST_SHARED = 0.5  # of an epoch's samples that two ranks may both read


def ranks(runs: Runs) -> Iterator[Verdict]:
    """Train on two processes; then give one process the batches of both, joined."""
    own = runs.own()
    recorded = {"ranks": 2, "quiet": True, "record": True}
    two = runs.run(**recorded)
    if not two[0].is_distributed:
        raise NotJudgedError(
            "the script makes no process group: start it as torchrun would, or call init_process_group"
        )
    why = "" if own.own_ranks > 1 or not own.is_lightning else "the script asks for one process"
    if divided := _divided(own.state, two[0].state) or _divided(two[0].state, two[1].state):
        text = f"ranks hold parts of the model: {divided} has not the same shape on one process and on both ranks"
        raise NotJudgedError(text)
    are_alike = _are_same(two[0].samples, two[1].samples)
    if are_alike:
        if _hold_parts(two):
            yield _of_parts(runs, two, why)
            return
        if two[0].first != two[1].first:
            text = "ranks train the same samples with other weights, as parts of a model of which one process holds one"
            raise NotJudgedError(text)
    yield unused(_replicas(two), why)
    if own.own_ranks == 1:  # otherwise `epochs` looks at it
        yield from (unused(verdict, why) for verdict in same_orders(two[0]))
    yield from _draws(runs, own)
    shares = "share" in two[0].asked
    if not shares and (verdict := _data(two)):
        yield unused(verdict, why)
        if verdict.outcome == "fail":
            raise NotJudgedError("ranks read the same samples, so there is no batch of both")
    if UNDIVIDED in two[0].remarks:
        raise NotJudgedError(UNDIVIDED)
    takes_rows = shares and are_alike  # each rank, of a batch that all have
    joined = {"imposed": runs.imposed(recorded, ranks=2)} if two[0].batches and not takes_rows else {}
    one = runs.run(quiet=True, **joined)[0]
    both = [[*a, *b] for a, b in zip(two[0].samples, two[1].samples, strict=False)]
    if not two[0].batches and not shares and not _are_same(one.samples, both):
        raise NotJudgedError(f"{_NO_LOADER}: divide batches by relations.share(batch)")
    if len(one.norms) == 2 * len(two[0].norms):
        raise NotJudgedError("with batches of twice the size it makes twice as many steps")
    verdict = runs.judge("ranks", one, two[0], leave_out=_LEFT_OUT, samples=False, said="2 processes: ")
    yield _weighed(verdict, [*two, one], why)
    yield from _reported(runs, verdict, one, two[0], "by 2 processes")
    if verdict.outcome == "pass" and not own.is_lightning:
        for verdict in on_two_ranks(runs, one, two[0]):
            yield unused(verdict, why)


def _of_parts(runs: Runs, two: list[Trace], why: str) -> Verdict:
    """Ranks that divide the model train each batch together, as one process trains it."""
    one = runs.run(quiet=True)[0]
    if not _are_same(one.samples, two[0].samples):
        raise NotJudgedError("ranks hold parts of the model, and one process reads other samples")
    whole = replace(two[0], state=two[1].state | two[0].state)
    said = "2 processes that hold parts of the model: "
    return unused(runs.judge("ranks", one, whole, leave_out=_LEFT_OUT, samples=False, said=said), why)


def _hold_parts(two: list[Trace]) -> bool:
    """Whether ranks have parameters of their own, or parts of them."""
    first, second = ({name for name in trace.state if name.startswith("optimizer/")} for trace in two)
    return first != second or PARTS in two[0].remarks


def accumulation(runs: Runs) -> Iterator[Verdict]:
    """Train with microbatches; then with one batch of all."""
    own = runs.own()
    if own.is_lightning and "manual" in own.remarks:
        raise NotJudgedError("manual optimization accumulates by itself: a plain script can call relations.knob")
    if not own.is_lightning and "accumulate" not in own.asked:
        raise NotJudgedError('write relations.knob("accumulate", N) for the number of microbatches')
    micro = own.own_accumulation if own.is_lightning else int(own.asked["accumulate"])
    whole, divided = _whole_and_divided(runs, own, micro)
    said = f"{max(micro, 2)} microbatches"
    verdict = runs.judge("accumulation", whole, divided, leave_out=_LEFT_OUT, samples=False, said=f"{said}: ")
    yield _weighed(verdict, [whole, divided], "" if micro > 1 else "the script does not accumulate")
    yield from _reported(runs, verdict, whole, divided, f"with {said}")


def _whole_and_divided(runs: Runs, own: Trace, micro: int) -> tuple[Trace, Trace]:
    """The training with one batch to a step, and with microbatches of the same samples."""
    if "batch_size" in own.asked:
        whole, divided = _with_other_batches(runs, int(own.asked["batch_size"]) * micro, max(micro, 2))
        if _are_same(whole.samples, divided.samples):
            return whole, divided
    if not own.batches:  # the samples of a step may be the same by themselves
        numbers = (1, max(micro, 2))
        whole, divided = (
            runs.run(quiet=True, **_accumulating(own, number, runs, parts=number))[0] for number in numbers
        )
        if not _are_same(whole.samples, divided.samples):
            remedy = 'write relations.knob("batch_size", N) for the samples of a microbatch'
            raise NotJudgedError(f"{_NO_LOADER}, and each step has other samples: {remedy}")
        return whole, divided
    most = micro * max(_FEWEST_WINDOWS, -(-runs.plan.most_batches // micro))
    recorded = {"quiet": True, "record": True, "most_batches": most if micro > 1 else runs.plan.most_batches}
    if not own.is_lightning and _divides_batches(runs, own, micro):
        most = max(micro, 2)
        same = {"imposed": runs.imposed(recorded, multiple=most), "quiet": True}
        whole, divided = (runs.run(**same, knobs=(("accumulate", number),))[0] for number in (1, most))
    elif micro > 1:
        divided = runs.run(**recorded)[0]
        changes = {"imposed": runs.imposed(recorded, window=micro), **_accumulating(own, 1, runs, window=micro)}
        whole = runs.run(quiet=True, **changes)[0]
    else:
        whole = runs.run(quiet=True, imposed=runs.imposed(recorded, multiple=2))[0]
        changes = {"imposed": runs.imposed(recorded, parts=2, multiple=2), **_accumulating(own, 2, runs, parts=2)}
        divided = runs.run(quiet=True, **changes)[0]
    if UNDIVIDED in own.remarks:
        raise NotJudgedError(UNDIVIDED)
    return whole, divided


def _with_other_batches(runs: Runs, size: int, number: int) -> Iterator[Trace]:
    """The training with one batch of `size` to a step, and with `number`; an epoch's last step may have fewer."""
    windows = -(-runs.plan.most_batches // number)
    for parts in (1, number):
        knobs = (("accumulate", parts), ("batch_size", size // parts))
        yield runs.run(quiet=True, most_batches=windows * parts, knobs=knobs)[0]


def _are_same(one: list[list[int]], other: list[list[int]]) -> bool:
    """Whether steps are made of the same samples, which all are known."""
    return all(one) and all(other) and len(one) == len(other) > 0 and not other_samples(one, other)


def _divides_batches(runs: Runs, own: Trace, micro: int) -> bool:
    """Whether the script makes its microbatches of each batch: then a batch has as many steps with them as without.

    Each of several optimizers makes steps, and a run may end by their number.
    """
    other = runs.run(knobs=(("accumulate", 1 if micro > 1 else 2),))[0]
    return other.steps * own.batches == own.steps * other.batches


def _reported(runs: Runs, verdict: Verdict, one: Trace, other: Trace, how: str) -> Iterator[Verdict]:
    """What a training that is the same reports beside its evaluations, such as a loss."""
    values, others = one.reported, other.reported
    names = [name for name in values.keys() & others.keys() if not name.startswith(("val", "score", "rescored"))]
    names = [name for name in names if not f"kept/metric.{name}".startswith(tuple(runs.unsteady))]
    apart = [name for name in sorted(names) if difference(values[name], others[name]) > _REPORTED]
    if verdict.outcome == "pass" and apart:
        text = f"{apart[0]} is reported as {values[apart[0]]:.6g}, and {how} as {others[apart[0]]:.6g}"
        yield Verdict(f"reports of {verdict.relation}", "note", text)


def _accumulating(own: Trace, number: int, runs: Runs, *, window: int = 1, parts: int = 1) -> dict[str, object]:
    if not own.is_lightning:
        return {"knobs": (("accumulate", number),)}
    most = max(_FEWEST_WINDOWS, -(-runs.plan.most_batches // window)) * parts
    return {"trainer": (("accumulate_grad_batches", number), ("limit_train_batches", most)), "most_batches": most}


def _weighed(verdict: Verdict, traces: list[Trace], why: str) -> Verdict:
    for reason in (IN_STEP, OF_BATCH, ROUNDED):
        if verdict.outcome == "fail" and any(reason in trace.remarks for trace in traces):
            raise NotJudgedError(reason)
    return unused(verdict, why)


def _divided(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    """The first weight that has another shape in the other state, if both have weights."""
    names = [name for name in {**one, **two} if name.startswith("weights/")]
    apart = (name for name in names if getattr(one.get(name), "shape", None) != getattr(two.get(name), "shape", None))
    return next(apart, "") if one and two else ""


def _replicas(two: list[Trace]) -> Verdict:
    """After the training both ranks hold the same weights and states of optimizers, bit for bit."""
    first, second = (trace.state for trace in two)
    names = [name for name in first if name.startswith(("weights/", "optimizer/"))]
    names = [name for name in names if not name.startswith("optimizer/group ")]  # of no parameter of the model: parts
    found = [str(Difference(name, size)) for name in names if (size := difference(first[name], second.get(name))) > 0]
    text = f"{found[0]} is not the same on both ranks; {len(found)} tensors differ" if found else ""
    return Verdict("replicas", "fail" if found else "pass", text, f"{len(names)} tensors of 2 ranks", found[:20])


def _draws(runs: Runs, own: Trace) -> Iterator[Verdict]:
    """Both ranks draw other numbers, such as for dropout or noise."""
    if own.own_ranks > 1 or not own.is_lightning:
        first, second = (set(trace.drawn) for trace in runs.run(ranks=2))
        if first & second:
            text = "both ranks draw the same random numbers in a step: seed each by its rank"
            yield Verdict("draws of ranks", "note", text)


def _data(two: list[Trace]) -> Verdict | None:
    """Whether ranks read the same samples."""
    first, second = ({sample for step in trace.samples for sample in step} for trace in two)
    if min(len(first), len(second)) < 2:
        return None
    shared = len(first & second) / min(len(first), len(second))
    steps = [set(a) & set(b) for a, b in zip(two[0].samples, two[1].samples, strict=False) if a and b]
    together = sum(map(len, steps)) / max(1, sum(len(set(a)) for a in two[0].samples))
    if together >= _MOST_SHARED:
        return Verdict("samples of ranks", "fail", f"{together:.0%} of a step's samples are read by both ranks")
    looked_at = f"{len(first)} and {len(second)} samples, {shared:.0%} of them on both in the end"
    return Verdict("samples of ranks", "pass", looked_at=looked_at)
