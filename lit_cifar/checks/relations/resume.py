"""A training that is interrupted and resumed ends as one that is not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.runs import RunError, Runs, Verdict

NAME = "resume"


def resumed(runs: Runs) -> Iterator[Verdict]:
    """Stop after an epoch, and inside one; for a script with calls, at two of its calls of `save`."""
    own = runs.own()
    if own.is_lightning:
        batches = own.epochs[0]
        yield _judged(runs, f"{NAME} after epoch 1", {"save_at": 1, "save_epoch": True})
        if batches > 1:
            yield _judged(runs, f"{NAME} inside epoch 2", {"save_at": batches + (batches + 1) // 2}, inside=True)
        return
    if not {"resume", "save"} <= own.asked.keys():
        remedy = "call relations.save() where a checkpoint could be written, and relations.resume() before it is read"
        yield Verdict(NAME, "abstain", remedy)
        return
    if not own.saves or own.saves[-1] == 0:
        yield Verdict(NAME, "abstain", "relations.save() was never called after a step: write a checkpoint earlier")
        return
    for number in sorted({1 + len(own.saves) // 3, 1 + 2 * len(own.saves) // 3}):
        if number < len(own.saves) or len(own.saves) == 1:
            yield _judged(runs, f"{NAME} after {own.saves[number - 1]} steps", {"save_at": number})


def _judged(runs: Runs, name: str, where: dict[str, Any], *, inside: bool = False) -> Verdict:
    redrawn = _redrawn(runs)
    verdict, halves = _compared(runs, name, where, redrawn)
    if verdict.outcome != "fail":
        return verdict
    imposed, _ = _compared(runs, name, where, redrawn, generators=True)
    if imposed.outcome == "pass":
        text = f"equal only if random generators are set alike: a checkpoint does not hold their states ({verdict.text})"
        return replace(imposed, outcome="note", text=text)
    if inside:
        follows = {"record": True, "generators": True}
        *before, begun = halves[0].epochs
        given = {"imposed": runs.imposed(follows, first_epoch=len(before), skip=begun), "generators": True}
        whole, (first, second) = runs.run(**follows)[0], _halves(runs, where, redrawn, first={"generators": True}, second=given)
        if runs.judge(name, whole, _one(first, second)).outcome == "pass":
            text = "all but the samples is equal: Lightning begins the order of the epoch anew, unless its loader has a state"
            return replace(verdict, outcome="note", text=f"{text} ({verdict.text})")
    first, second = halves
    lost = [str(each) for each in runs.differences(first.saved, second.resumed, leave_out=("kept/metric",))]
    if lost and second.resumed:
        return replace(verdict, text=f"{lost[0]} is not what it was when the checkpoint was written; {verdict.text}")
    return verdict


def _compared(
    runs: Runs, name: str, where: dict[str, Any], redrawn: tuple[int, ...], *, generators: bool = False
) -> tuple[Verdict, tuple[Trace, Trace]]:
    same = {"generators": generators}
    halves = _halves(runs, where, redrawn, first=same, second=same)
    return runs.judge(name, runs.run(**same)[0], _one(*halves), leave_out=("kept/module.example",)), halves


def _halves(
    runs: Runs, where: dict[str, Any], redrawn: tuple[int, ...], *, first: dict[str, Any], second: dict[str, Any]
) -> tuple[Trace, Trace]:
    """The run that writes a checkpoint, and the one that reads it."""
    begun = runs.run(**where, **first)[0]
    path = runs.folder_of(**where, **first) / "0" / "checkpoint"
    if not path.exists():
        raise RunError("an end before a checkpoint was written")
    steps = {"steps_before": begun.steps, "most_steps": max(1, runs.plan.most_steps - begun.steps)}
    return begun, runs.run(resume=str(path), redrawn=redrawn, **steps, **second)[0]


def _one(first: Trace, second: Trace) -> Trace:
    """Both as one training."""
    return replace(
        second,
        samples=[*first.samples[: first.steps], *second.samples],
        norms=[*first.norms, *second.norms],
    )


def _redrawn(runs: Runs) -> tuple[int, ...]:
    """Parameters that another seed draws otherwise. Those that come from a file need not be in a checkpoint."""
    own, other = runs.own().first, runs.run(seed=1, most_steps=1)[0].first
    return tuple(place for place, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
