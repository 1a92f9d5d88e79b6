"""Two processes with half of a batch each train what one process trains with all of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lit_cifar.checks.compare import difference, differences
from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.evaluation import TOLD, on_two_ranks
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import NotJudgedError, Runs, are_same_samples, unused
from lit_cifar.checks.relations.told import SCORES, results
from lit_cifar.checks.relations.workers import same_orders
from lit_cifar.checks.verdict import Verdict

LEFT_OUT = ("kept/metric", "kept/val", "kept/loss", "kept/train")
_MOST_SHARED = 0.5  # of an epoch's samples that two ranks may both read


@dataclass
class Drawn:
    """What a process writes down."""

    states: set[int] = field(default_factory=set)  # digests of the generators before steps that drew numbers


def ranks(runs: Runs) -> Iterator[Verdict]:
    """Train on two processes; then give one process the batches of both, joined."""
    own = runs.own()
    recorded = {"ranks": 2, "quiet": True, "record": True}
    two = runs.run(**recorded)
    if not two[0].script.is_distributed:
        raise NotJudgedError(
            "the script makes no process group: start it as torchrun would, or call init_process_group"
        )
    is_used = own.script.ranks > 1 or not own.script.is_lightning
    why = "" if is_used else "the script asks for one process"
    if divided := _divided(own.state, two[0].state) or _divided(two[0].state, two[1].state):
        text = f"ranks hold parts of the model: {divided} has not the same shape on one process and on both ranks"
        raise NotJudgedError(text)
    are_alike = are_same_samples(two[0].samples, two[1].samples)
    if are_alike:
        if _hold_parts(two):
            yield _of_parts(runs, two, why)
            return
        if two[0].first != two[1].first:
            text = "ranks train the same samples with other weights, as parts of a model of which one process holds one"
            raise NotJudgedError(text)
    yield unused(_replicas(two), why)
    if own.script.ranks == 1:  # otherwise `epochs` looks at it
        yield from (unused(verdict, why) for verdict in same_orders(two[0]))
    if is_used:
        yield from _draws(runs)
    shares = "share" in two[0].script.calls
    if not shares and (verdict := _data(two)):
        yield unused(verdict, why)
        if verdict.outcome == "fail":
            raise NotJudgedError("ranks read the same samples, so there is no batch of both")
    if remarks.UNDIVIDED in two[0].remarks:
        raise NotJudgedError(remarks.UNDIVIDED)
    batches = two[0].reading.batches
    takes_rows = shares and are_alike  # each rank, of a batch that all have
    joined = {"imposed": runs.imposed(recorded, ranks=2)} if batches and not takes_rows else {}
    one = runs.run(quiet=True, **joined)[0]
    both = [[*a, *b] for a, b in zip(two[0].samples, two[1].samples, strict=False)]
    if not batches and not shares and not are_same_samples(one.samples, both):
        raise NotJudgedError(remarks.NO_LOADER, "batch = relations.share(batch)  # this rank's rows of it")
    of_one, of_two = (trace.steps / max(1, trace.reading.batches) for trace in (one, two[0]))
    if round(of_one / (of_two or 1)) == 2:  # per batch: a run may be ended by their number
        raise NotJudgedError("with batches of twice the size it makes twice as many steps")
    verdict = runs.judge("ranks", one, two[0], leave_out=LEFT_OUT, samples=False, said="2 processes: ")
    yield weighed(verdict, [*two, one], why)
    yield from reported(runs, verdict, one, two[0], "by 2 processes")
    if verdict.outcome == "pass" and not own.script.is_lightning:
        for verdict in on_two_ranks(runs, {"quiet": True, **joined}, two[0]):
            yield unused(verdict, why)


def _of_parts(runs: Runs, two: list[Trace], why: str) -> Verdict:
    """Ranks that divide the model train each batch together, as one process trains it."""
    one = runs.run(quiet=True)[0]
    if not are_same_samples(one.samples, two[0].samples):
        raise NotJudgedError("ranks hold parts of the model, and one process reads other samples")
    whole = replace(two[0], state=two[1].state | two[0].state)
    said = "2 processes that hold parts of the model: "
    return unused(runs.judge("ranks", one, whole, leave_out=LEFT_OUT, samples=False, said=said), why)


def _hold_parts(two: list[Trace]) -> bool:
    """Whether ranks have parameters of their own, or parts of them."""
    first, second = ({name for name in trace.state if name.startswith("optimizer/")} for trace in two)
    return first != second or remarks.PARTS in two[0].remarks


def _divided(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    """The first weight that has another shape in the other state, if both have weights."""
    names = [name for name in {**one, **two} if name.startswith("weights/")]
    apart = (name for name in names if getattr(one.get(name), "shape", None) != getattr(two.get(name), "shape", None))
    return next(apart, "") if one and two else ""


def _replicas(two: list[Trace]) -> Verdict:
    """After the training both ranks hold the same weights and states of optimizers."""
    first, second = (trace.state for trace in two)
    names = [name for name in first if name.startswith(("weights/", "optimizer/"))]
    names = [name for name in names if not name.startswith("optimizer/group ")]  # of no parameter of the model: parts
    found = [str(each) for each in differences(first, second, names=names)]
    text = f"{found[0]} between both ranks; {len(found)} tensors differ" if found else ""
    return Verdict("replicas", "fail" if found else "pass", text, f"{len(names)} tensors of 2 ranks", found[:20])


def _draws(runs: Runs) -> Iterator[Verdict]:
    """Both ranks draw other numbers, such as for dropout or noise."""
    first, second = (trace.part(Drawn).states for trace in runs.run(ranks=2))
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
    looked_at = f"{len(first)} and {len(second)} samples" + (f", {shared:.0%} on both" if shared else ", none on both")
    return Verdict("samples of ranks", "pass", looked_at=looked_at)


# What the accumulation of gradients shares with this
def weighed(verdict: Verdict, traces: list[Trace], why: str) -> Verdict:
    """The verdict; a failure is none where the same samples in other batches train otherwise by right."""
    for reason in (remarks.IN_STEP, remarks.OF_BATCH, remarks.ROUNDED):
        if verdict.outcome == "fail" and any(reason in trace.remarks for trace in traces):
            raise NotJudgedError(reason)
    return unused(verdict, why)


def reported(runs: Runs, verdict: Verdict, one: Trace, other: Trace, how: str) -> Iterator[Verdict]:
    """What a training that is the same reports beside its evaluations, such as a loss."""
    values, others = one.reported, other.reported
    names = values.keys() & others.keys() - results(one).keys()
    left = sorted(name for name in names if name[0] not in runs.unsteady and not name[0].startswith(SCORES))
    apart = [name for name in left if difference(values[name], others[name]) > max(TOLD, runs.limit_of(name))]
    if verdict.outcome == "pass" and apart:
        (name, steps), value, other_value = apart[0], values[apart[0]], others[apart[0]]
        text = f"{name} after {steps} steps is reported as {value:.6g}, and {how} as {other_value:.6g}"
        yield Verdict(f"reports of {verdict.relation}", "note", text)
