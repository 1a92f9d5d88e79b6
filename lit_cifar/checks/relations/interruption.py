"""A training that is interrupted and resumed ends as one that is not."""

from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from lit_cifar.checks.relations.plan import Imposed, Trace
from lit_cifar.checks.relations.runs import NotJudgedError, RunError, Runs, RunTimeoutError, Verdict, unused
from lit_cifar.checks.relations.watching import CHECKPOINT

NAME = "resume"
_MOST_RANKS = 2
_EPOCHS = 3  # in which a script is stopped twice
_MANY = 5  # calls of `save` that are more than one in each epoch
_LATE = (
    "equal only if the checkpoint is written when the next batch begins: Lightning's callbacks write it before the "
    "module's own on_train_batch_end"
)
_LEFT_OUT = ("kept/metric", "kept/module.example")


def resumed(runs: Runs) -> Iterator[Verdict]:
    """Stop after an epoch, and inside each later one; for a script with calls, at two of its calls of `save`."""
    own = runs.own()
    if not own.is_lightning and not {"resume", "save"} <= own.asked.keys():
        remedy = "call relations.save() where a checkpoint could be written, and relations.resume() before it is read"
        raise NotJudgedError(remedy)
    ranks = min(max(own.own_ranks, runs.plan.ranks), _MOST_RANKS)
    own = runs.run(ranks=ranks)[0]
    drawn = _drawn(runs, ranks)
    if own.is_lightning:
        batches = own.batches_of_epoch
        yield _Interruption(runs, f"{NAME} after epoch 1", ranks, drawn, save_at=1, save_after="epoch").verdict()
        for epoch in range(1, own.epochs_begun if batches > 1 else 0):
            windows = max(1, (batches + 1) // 2 // own.own_accumulation)
            inside = epoch * batches + windows * own.own_accumulation
            yield _Interruption(runs, f"{NAME} inside epoch {epoch + 1}", ranks, drawn, save_at=inside).verdict()
        return
    verdicts = [*_at_calls_of_save(runs, ranks, drawn)]
    if own.cut_from and any(verdict.has_other_samples for verdict in verdicts):
        verdicts = [*_in_whole_epochs(runs, ranks, drawn, own.cut_from, verdicts)]
    yield from verdicts


def _at_calls_of_save(runs: Runs, ranks: int, drawn: tuple[int, ...]) -> Iterator[Verdict]:
    """Stop a plain script after a third and two thirds of its calls."""
    steps = runs.run(ranks=ranks)[0].saves
    calls = [number for number in _thirds(len(steps)) if steps[number - 1]]
    if not calls:
        raise NotJudgedError("relations.save() was never called after a step: write a checkpoint earlier")
    for number in calls:
        yield _Interruption(runs, f"{NAME} after {steps[number - 1]} steps", ranks, drawn, save_at=number).verdict()


def _in_whole_epochs(
    runs: Runs, ranks: int, drawn: tuple[int, ...], batches: int, failed: list[Verdict]
) -> Iterator[Verdict]:
    """Judge once more: a script may compute its place in the data from the length of an epoch, which was cut."""
    most = runs.plan.most_steps
    steps = max(most, _EPOCHS * batches)
    if batches <= most:
        whole = copy(runs)
        whole.plan = replace(runs.plan, most_batches=batches, most_steps=steps)
        with suppress(RunTimeoutError):
            yield from [*_at_calls_of_save(whole, ranks, drawn)]
            return
    cut = f"if it counts on whole epochs, which were cut after {runs.plan.most_batches} of {batches} batches, pass"
    for verdict in failed:
        text = f"{verdict.text}; {cut} --batches={batches} --steps={steps}"
        yield replace(verdict, outcome="note", text=text) if verdict.has_other_samples else verdict


def _samples(whole: Trace, begun: Trace, ended: Trace) -> list[list[int]]:
    """The samples of each step of both halves; a step that was begun before the checkpoint may be ended after it."""
    before = [*begun.samples, *([] for _ in range(begun.steps))][: begun.steps]
    of_step = [sample for step in begun.samples[begun.steps :] for sample in step]
    after = ended.samples[0] if ended.samples else []
    if after and len(of_step) + len(after) == sum(map(len, whole.samples[begun.steps : begun.steps + 1])):
        return [*before, [*of_step, *after], *ended.samples[1:]]
    return [*before, *ended.samples]


def _thirds(count: int) -> list[int]:
    """The calls of `save` after a third and just behind two thirds, which is no epoch's end if each step calls it."""
    return sorted({max(1, count // 3), count * 2 // 3 + (count > _MANY) or 1}) if count else []


def _drawn(runs: Runs, ranks: int) -> tuple[int, ...]:
    """Parameters that another seed draws otherwise. Those that come from a file need not be in a checkpoint."""
    own, other = (runs.run(ranks=ranks, **changes)[0].first for changes in ({}, {"seed": 1, "most_steps": 1}))
    return tuple(place for place, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)


class _ResumeError(RunError):
    """The training ended by an error when it was resumed."""


@dataclass
class _Interruption:
    """A training that is stopped at one place, and goes on in new processes."""

    runs: Runs
    name: str
    ranks: int
    drawn: tuple[int, ...]
    save_at: int
    save_after: str = "batch"

    def verdict(self) -> Verdict:
        """Judge the training as it is; where it differs, with generators that follow the step: only state can then."""
        try:
            as_it_is = self._judged()
        except _ResumeError as error:
            return Verdict(self.name, "fail", f"the resumed training: {error}")
        if as_it_is.outcome != "fail":
            return as_it_is
        if self.drawn and (unspoilt := replace(self, drawn=())._judged()).outcome != "fail":
            text = f"equal only because the same seed draws what the checkpoint does not hold ({as_it_is.text})"
            return replace(unspoilt, outcome="note", text=text)
        verdict = self._judged(generators=True)
        if verdict.outcome == "pass":
            text = "equal only if random generators are set alike: a checkpoint does not hold their states"
            return replace(verdict, outcome="note", text=f"{text} ({as_it_is.text})")
        first, second = self._halves(generators=True)
        if first[0].is_lightning and first[0].epochs and self.save_after == "batch":
            if len(first[0].lengths) > 1:
                text = f"in the middle of an epoch of several loaders, the order cannot be given: {as_it_is.text}"
                return replace(verdict, outcome="abstain", text=text)
            with_samples = self._judged_with_samples()
            if with_samples.outcome == "pass":
                text = (
                    "equal but for the samples: Lightning begins the order of an epoch anew, if its loader has no state"
                )
                return replace(verdict, outcome="note", text=f"{text} ({as_it_is.text})")
            if replace(self, save_after="hooks")._judged_with_samples().outcome == "pass":
                text = f"{_LATE} ({with_samples.text})"
                return replace(with_samples, outcome="note", text=text)
            verdict = with_samples
        saved, resumed = first[0].saved, second[0].resumed
        both = [{name: state[name] for name in saved.keys() & resumed.keys()} for state in (saved, resumed)]
        if verdict.outcome == "fail" and (lost := self.runs.differences(*both, leave_out=(*_LEFT_OUT, "kept/val"))):
            return replace(verdict, text=f"{lost[0]} is not what it was at the checkpoint; {verdict.text}")
        return verdict

    def _judged(self, *, generators: bool = False) -> Verdict:
        whole = self.runs.run(ranks=self.ranks, generators=generators)
        return self._compared(whole, *self._halves(generators=generators))

    def _judged_with_samples(self) -> Verdict:
        """Give the second half the samples that come next."""
        follows = {"ranks": self.ranks, "record": True, "generators": True}
        first, _ = self._halves(generators=True)
        *before, begun = first[0].epochs
        skip = begun - (self.save_after == "hooks")
        imposed = self.runs.imposed(follows, first_epoch=len(before), skip=skip)
        return self._compared(self.runs.run(**follows), *self._halves(generators=True, imposed=imposed))

    def _halves(self, *, generators: bool, imposed: Imposed | None = None) -> tuple[list[Trace], list[Trace]]:
        """The run that writes a checkpoint, and the one that reads it."""
        same: dict[str, Any] = {"ranks": self.ranks, "generators": generators}
        stopped = {**same, "save_at": self.save_at, "save_after": self.save_after}
        begun = self.runs.run(**stopped)
        folder = self.runs.folder_of(**stopped)
        if not any(folder.glob(f"{CHECKPOINT}*")):
            raise RunError("its end, before a checkpoint was written where relations.save() said")
        steps = {"steps_before": begun[0].steps, "most_steps": max(1, self.runs.plan.most_steps - begun[0].steps)}
        path = str(folder / CHECKPOINT)
        try:
            return begun, self.runs.run(**same, resume=path, redrawn=self.drawn, imposed=imposed, **steps)
        except RunError as error:
            raise _ResumeError(str(error)) from None

    def _compared(self, whole: list[Trace], first: list[Trace], second: list[Trace]) -> Verdict:
        """The verdict of the first rank whose halves are not equal to its whole, or that of rank 0."""
        verdicts = []
        for rank, (of_whole, begun, ended) in enumerate(zip(whole, first, second, strict=True)):
            reported = {f"kept/{name}" for _, values in begun.logged for name in values}  # and perhaps not again
            state = {name: value for name, value in begun.state.items() if name in reported} | ended.state
            samples = _samples(of_whole, begun, ended)
            one = replace(ended, state=state, samples=samples, norms=[*begun.norms, *ended.norms])
            said = f"rank {rank}: " if rank else ""
            verdict = self.runs.judge(self.name, of_whole, one, leave_out=_LEFT_OUT, said=said)
            others = f"it trains {of_whole.models} models, and {ended.models} after it was resumed"
            verdicts.append(unused(verdict, others if 0 < ended.models != of_whole.models else ""))
        return next((verdict for verdict in verdicts if verdict.outcome == "fail"), verdicts[0])
