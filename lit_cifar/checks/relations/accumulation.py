"""Microbatches train what one batch of all trains."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from lit_cifar.checks.compare import differences
from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.ranks import LEFT_OUT, reported, weighed
from lit_cifar.checks.relations.runs import NotJudgedError, Runs, are_same_samples, unused
from lit_cifar.checks.verdict import Verdict

_PASTE = 'accumulate = relations.knob("accumulate", accumulate)  # microbatches of a step'
_RECORDED = {"quiet": True, "record": True}  # the changes of a run that keeps its batches
Pair: TypeAlias = tuple[Trace, Trace]  # with one batch to a step, and with microbatches of the same samples


def accumulation(runs: Runs) -> Iterator[Verdict]:
    """Train with microbatches; then with one batch of all."""
    own = runs.own()
    script = own.script
    if script.is_lightning and remarks.MANUAL in own.remarks:
        raise NotJudgedError(remarks.MANUAL)
    flags = script.by_flag
    if not script.is_lightning and "accumulate" not in script.knobs:
        raise NotJudgedError("nothing says how many microbatches a step has", _PASTE)
    micro = script.window
    whole, divided = _pair(runs, own, micro)
    said = f"{max(micro, 2)} microbatches"
    verdict = _compared(runs, whole, divided, said)
    if verdict.outcome == "fail" and own.reading.batches and {"accumulate", "batch_size"} <= flags.keys():
        sized = _with_flag_of_size(runs, own, micro)
        if (other := _compared(runs, *sized, said)).outcome != "fail":
            verdict, (whole, divided) = other, sized
    if verdict.outcome == "fail" and micro > 1 and len(own.reading.lengths) == 1:
        verdict = _without_rest(runs, own, micro, verdict)
    if "accumulate" in flags and own.reading.batches:
        verdict = _by_flag(runs, own, micro, flags["accumulate"].words[-1], verdict, whole, divided)
    yield weighed(verdict, [whole, divided], "" if micro > 1 else "the script does not accumulate")
    yield from reported(runs, verdict, whole, divided, f"with {said}")


def _compared(runs: Runs, whole: Trace, divided: Trace, said: str) -> Verdict:
    return runs.judge("accumulation", whole, divided, leave_out=LEFT_OUT, samples=False, said=f"{said}: ")


def _without_rest(runs: Runs, own: Trace, micro: int, failed: Verdict) -> Verdict:
    """The failure; what is said of it if the training holds without what is left over at the end of its epochs."""

    def holds(batches: int, *, is_even: bool = False) -> bool:
        if batches < 1:
            return False
        pair = _pair(runs.with_limits(batches=batches), own, micro, is_even=is_even)
        return _compared(runs, *pair, "").outcome != "fail"

    (length,) = own.reading.lengths.values()
    is_whole = not own.reading.cut
    if holds(length, is_even=True) or (is_whole and holds(length - micro)):
        text = f"equal only if all microbatches have as many samples: one of fewer counts as much ({failed.text})"
        return replace(failed, outcome="note", text=text)
    if not length % micro or not holds((length - is_whole) // micro * micro):
        return failed
    rest = f"{length % micro} of {micro} microbatches, with which an epoch ends"
    if failed.has_other_steps:
        return replace(failed, outcome="note", text=f"no step of their own is made by {rest} ({failed.text})")
    return replace(failed, text=f"only a last window differs, of {rest}: {failed.text}")


def _by_flag(runs: Runs, own: Trace, micro: int, flag: str, verdict: Verdict, whole: Trace, divided: Trace) -> Verdict:
    """The verdict; one that blames nobody where the flag seems to mean something else than microbatches."""
    if verdict.outcome == "fail" and whole.steps != divided.steps:
        raise NotJudgedError(f"another {flag} makes other steps", _PASTE)
    if not differences(whole.state, divided.state):
        raise NotJudgedError(f"another {flag} changes nothing", _PASTE)
    if verdict.outcome == "fail" and _divides_batches(runs, own, micro):
        return unused(verdict, f"if {flag} divides each batch")
    return verdict


def _with_flag_of_size(runs: Runs, own: Trace, micro: int) -> Pair:
    """A pair whose batches have their size by the script's flag too, as a setting such as the rate may follow it."""
    size = int(own.script.knobs["batch_size"])
    if micro > 1:
        return _joined(runs, own, micro, ("batch_size", size * micro))
    return _halved(runs, own, ("batch_size", max(1, size // 2)))


def _pair(runs: Runs, own: Trace, micro: int, *, is_even: bool = False) -> Pair:
    """Two runs whose steps have the same samples. A script that does not accumulate is given two microbatches.

    With `is_even` the batches that a script divides are cut, so that all microbatches have as many samples.
    """
    number = max(micro, 2)
    if "batch_size" in own.script.calls or ("batch_size" in own.script.by_flag and not own.reading.batches):
        whole, divided = _of_other_sizes(runs, int(own.script.knobs["batch_size"]) * micro, number)
        is_alike = are_same_samples(whole.samples, divided.samples)
        if is_alike and not (own.script.by_flag and runs.differences(whole.state, divided.state, kinds=("settings",))):
            return whole, divided
    if not own.reading.batches:
        return _alike_by_themselves(runs, own, number)
    if remarks.UNDIVIDED in own.remarks:
        raise NotJudgedError(remarks.UNDIVIDED)
    if not own.script.is_lightning and _divides_batches(runs, own, micro):
        cut = number if is_even else 1
        same = {"quiet": True, "imposed": runs.imposed(_RECORDED, multiple=cut)}
        return _run(runs, same, _accumulate(runs, own, 1)), _run(runs, same, _accumulate(runs, own, number))
    return _joined(runs, own, micro) if micro > 1 else _halved(runs, own)


def _of_other_sizes(runs: Runs, size: int, number: int) -> Pair:
    """By knobs: one batch of `size` to a step, and `number` of them; an epoch's last step may have fewer."""
    windows = -(-runs.plan.limits.batches // number)
    whole, divided = (
        runs.run(
            quiet=True,
            limits=replace(runs.plan.limits, batches=windows * parts),
            knobs=(("accumulate", parts), ("batch_size", size // parts)),
        )[0]
        for parts in (1, number)
    )
    return whole, divided


def _alike_by_themselves(runs: Runs, own: Trace, number: int) -> Pair:
    """Batches that no loader makes may have the same samples in a step, however many there are."""
    whole, divided = (_run(runs, {"quiet": True}, _accumulate(runs, own, parts, parts=parts)) for parts in (1, number))
    if not are_same_samples(whole.samples, divided.samples):
        paste = 'size = relations.knob("batch_size", size)  # samples of a microbatch'
        raise NotJudgedError(f"{remarks.NO_LOADER}, and each step has other samples", paste)
    return whole, divided


def _joined(runs: Runs, own: Trace, micro: int, *knobs: tuple[str, int]) -> Pair:
    """The script's own microbatches; and those of each step joined to one batch."""
    joined = {"quiet": True, "imposed": runs.imposed(_RECORDED, window=micro)}
    return _run(runs, joined, _accumulate(runs, own, 1, *knobs, window=micro)), _run(runs, _RECORDED)


def _halved(runs: Runs, own: Trace, *knobs: tuple[str, int]) -> Pair:
    """The script's own batches, of an even size; and halves of them."""
    whole = _run(runs, {"quiet": True, "imposed": runs.imposed(_RECORDED, multiple=2)})
    halves = {"quiet": True, "imposed": runs.imposed(_RECORDED, parts=2, multiple=2)}
    return whole, _run(runs, halves, _accumulate(runs, own, 2, *knobs, parts=2))


def _run(runs: Runs, *changes: dict[str, Any]) -> Trace:
    return runs.run(**{name: value for each in changes for name, value in each.items()})[0]


def _accumulate(
    runs: Runs, own: Trace, number: int, *knobs: tuple[str, int], window: int = 1, parts: int = 1
) -> dict[str, Any]:
    """The changes of a run in which `number` batches make a step."""
    if not own.script.is_lightning:
        return {"knobs": (("accumulate", number), *knobs)}
    limits = runs.plan.limits
    most = -(-limits.batches // window) * parts
    trainer = (("accumulate_grad_batches", number), ("limit_train_batches", most))
    return {"trainer": trainer, "limits": replace(limits, batches=most)}


def _divides_batches(runs: Runs, own: Trace, micro: int) -> bool:
    """Whether the script makes its microbatches of each batch: then a batch has as many steps with them as without.

    Each of several optimizers makes steps, and a run may end by their number.
    """
    other = _run(runs, _accumulate(runs, own, 1 if micro > 1 else 2))
    return other.steps * own.reading.batches == own.steps * other.reading.batches
