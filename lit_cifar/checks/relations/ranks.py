"""Two processes with half of a batch each train what one process trains with all of it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from lit_cifar.checks.compare import differences
from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.evaluation import on_two_ranks
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import NotJudgedError, RunError, Runs, are_same_samples, unused
from lit_cifar.checks.relations.trained import Observed
from lit_cifar.checks.relations.workers import same_orders
from lit_cifar.checks.verdict import Verdict

LEFT_OUT = ("kept/metric", "kept/val", "kept/loss", "kept/train")
_MOST_SHARED = 0.5  # of an epoch's samples that two ranks may both read


def ranks(runs: Runs) -> Iterator[Verdict]:
    """Train on two processes; then give one process the batches of both, joined."""
    own = runs.own()
    script = own.script
    runs = runs.with_limits(undivided=runs.plan.limits.evaluated)  # one process evaluates what two divide
    on_two = runs.planned(ranks=2, quiet=True)
    two = on_two.run(record=True)
    if not two[0].script.is_distributed:
        text = "the script makes no process group: start it as torchrun would, or call init_process_group"
        raise NotJudgedError(text)
    is_used = script.ranks > 1 or not script.is_lightning
    why = "" if is_used else "the script asks for one process"
    if divided := _divided(own, two[0]) or _divided(*two):
        text = f"ranks hold parts of the model: {divided} has not the same shape on one process and on both ranks"
        raise NotJudgedError(text)
    are_alike = are_same_samples(two[0].samples, two[1].samples)
    of_optimizers = [{name for name in trace.state if name.startswith("optimizer/")} for trace in two]
    if are_alike and (of_optimizers[0] != of_optimizers[1] or remarks.PARTS in two[0].remarks):
        yield unused(_of_parts(runs, two), why)
        return
    if are_alike and two[0].first != two[1].first:
        raise NotJudgedError("ranks train the same samples with other weights, as parts of a model do")
    yield unused(_replicas(two), why)
    if script.ranks == 1:  # otherwise `epochs` looks at it
        yield from (unused(verdict, why) for verdict in same_orders(two[0]))
    if is_used and set.intersection(*(trace.drawn for trace in runs.run(ranks=2))):
        text = "both ranks draw the same random numbers in a step: seed each by its rank"
        yield Verdict("draws of ranks", "note", text)
    shares = "share" in two[0].script.calls
    if not shares and (verdict := data_of_ranks(own, two)):
        yield unused(verdict, why)
        if verdict.outcome == "fail":
            raise NotJudgedError("ranks read the same samples, so there is no batch of both")
    if remarks.UNDIVIDED in two[0].remarks:
        raise NotJudgedError(remarks.UNDIVIDED)
    takes_rows = shares and are_alike  # each rank, of a batch that all have
    batches = two[0].reading.batches
    joined = on_two.imposed(ranks=2) if batches and not takes_rows else None
    alone, shared = runs.planned(quiet=True, imposed=joined), ""
    one = alone.own()
    if joined and _times_as_many_steps(two[0], one) == 2:  # as a script may do whose global batch is the same
        shared = ", of a step's microbatches half on each rank"
        alone = runs.planned(quiet=True, imposed=replace(joined, parts=2))
        one = alone.own()
    both = [[*a, *b] for a, b in zip(two[0].samples, two[1].samples, strict=False)]
    if not batches and not shares and not are_same_samples(one.samples, both):
        raise NotJudgedError(remarks.NO_LOADER, "batch = relations.share(batch)  # this rank's rows of it")
    if _times_as_many_steps(one, two[0]) == 2:
        raise NotJudgedError("with batches of twice the size it makes twice as many steps")
    of_other = {name: own for name, own in two[1].state.items() if name.startswith(("optimizer/", "settings/"))}
    both_of = replace(two[0], state=of_other | two[0].state)
    verdict = runs.judge("ranks", one, both_of, leave_out=LEFT_OUT, samples=False, said="2 processes: ")
    rates, of_two = (trace.part(Observed).rates for trace in (one, two[0]))
    if verdict.outcome == "fail" and "batch_size" in script.knobs:  # the rate, or the last step, may follow from it
        sized = alone.planned(knobs=(("batch_size", 2 * int(script.knobs["batch_size"])),))
        with suppress(RunError):
            other = runs.judge("ranks", sized.own(), both_of, leave_out=LEFT_OUT, samples=False, said="2 processes: ")
            if other.outcome == "pass" or sized.own().part(Observed).rates == of_two != rates:
                verdict, alone, one, rates = other, sized, sized.own(), of_two
    if verdict.outcome == "fail" and (peak := max(rates, default=0.0)) < max(of_two, default=0.0) <= 2 * peak:
        verdict = unused(verdict, "the learning rate is higher with two processes")
    yield weighed(replace(verdict, looked_at=verdict.looked_at + shared), [*two, one], why)
    if verdict.outcome == "pass" and not script.is_lightning:
        yield from (unused(verdict, why) for verdict in on_two_ranks(alone, two[0]))


def _times_as_many_steps(one: Trace, other: Trace) -> int:
    """Per batch, as a run may be ended by the number of its steps; about, as a last window may be left out."""
    of_one, of_other = (trace.steps / max(1, trace.reading.batches) for trace in (one, other))
    return round(of_one / (of_other or 1))


def _of_parts(runs: Runs, two: list[Trace]) -> Verdict:
    """Ranks that divide the model train each batch together, as one process trains it."""
    one = runs.own(quiet=True)
    if not are_same_samples(one.samples, two[0].samples):
        raise NotJudgedError("ranks hold parts of the model, and one process reads other samples")
    whole = replace(two[0], state=two[1].state | two[0].state)
    said = "2 processes that hold parts of the model: "
    return runs.judge("ranks", one, whole, leave_out=LEFT_OUT, samples=False, said=said)


def _divided(one: Trace, two: Trace) -> str:
    """The first weight that has another shape in the other run, if both have weights."""
    for name in {**one.state, **two.state} if one.state and two.state else ():
        shapes = [getattr(trace.state.get(name), "shape", None) for trace in (one, two)]
        if name.startswith("weights/") and shapes[0] != shapes[1]:
            return name
    return ""


def _replicas(two: list[Trace]) -> Verdict:
    """After the training both ranks hold the same weights and states of optimizers."""
    names = [name for name in two[0].state if name.startswith(("weights/", "optimizer/"))]
    names = [name for name in names if not name.startswith("optimizer/group ")]  # of no parameter of the model: parts
    names = [name for name in names if name in two[1].state or not name.startswith("optimizer/")]  # ZeRO divides them
    found = [f"{each} between both ranks" for each in differences(two[0].state, two[1].state, names=names)]
    return Verdict.by_findings("replicas", found, f"{len(names)} tensors of 2 ranks")


def data_of_ranks(one: Trace, two: list[Trace]) -> Verdict | None:
    """Whether ranks read the same samples, or each as many in an epoch as one process."""
    first, second = ({sample for step in trace.samples for sample in step} for trace in two)
    if min(len(first), len(second)) < 2:
        return None
    steps = [({*a}, {*b}) for a, b in zip(two[0].samples, two[1].samples, strict=False)]
    together = sum(len(a & b) for a, b in steps) / max(1, sum(len(a) for a, _ in steps))
    found = [f"{together:.0%} of a step's samples are read by both ranks"] if together >= _MOST_SHARED else []
    verdict = Verdict.by_findings("samples of ranks", found, f"{len(first)} and {len(second)} samples")
    epochs = [trace.reading.lengths | trace.reading.cut for trace in (one, *two)]
    sizes = [[*map(len, trace.samples[:1])] for trace in (one, *two)]
    is_divided = epochs.count(epochs[0]) < len(epochs) or sizes.count(sizes[0]) < len(sizes)
    if found or one.script.is_lightning or not epochs[0] or is_divided:  # Lightning divides by itself
        return verdict
    text = f"an epoch of each rank has as many batches as one of one process: {max(epochs[0].values())}"
    return replace(verdict, outcome="note", text=text)


def weighed(verdict: Verdict, traces: list[Trace], why: str) -> Verdict:
    """The verdict; a failure is none where the same samples in other batches train otherwise by right."""
    for reason in (remarks.IN_STEP, remarks.OF_BATCH, remarks.ROUNDED):
        if verdict.outcome == "fail" and any(reason in trace.remarks for trace in traces):
            raise NotJudgedError(reason)
    return unused(verdict, why)
