"""A training that is interrupted and resumed ends as one that is not."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lit_cifar.checks.compare import Difference
from lit_cifar.checks.relations.plan import Imposed, Trace
from lit_cifar.checks.relations.runs import NotJudgedError, RunError, Runs, RunTimeoutError, unused
from lit_cifar.checks.verdict import Verdict

NAME = "resume"
CHECKPOINT = "checkpoint"  # in the folder of the run, for all ranks; a script may add to the name
Moment: TypeAlias = Literal["batch", "hooks", "epoch", "write"]  # "hooks": all of a batch, so when the next begins
_MOST_RANKS = 2
_EPOCHS = 3  # in which a script is stopped twice
_MANY = 5  # calls of `save` that are more than one in each epoch
_LATE = (
    "equal only if the checkpoint is written when the next batch begins: Lightning's callbacks write it before the "
    "module's own on_train_batch_end"
)
PASTE = """\
if path := relations.resume():  # where a checkpoint would be read
    load(path)
if path := relations.save():  # where one could be written
    save(path)"""
_LEFT_OUT = ("kept/metric", "kept/module.example")


@dataclass(frozen=True)
class StopAt:
    """Asks a run to write a checkpoint and to end."""

    number: int  # of the call of `save`, of steps before a "write" of its own, or with Lightning of the batch or epoch
    after: Moment = "batch"
    batches: int = 0  # before a write


@dataclass(frozen=True)
class GoOn:
    """Asks a run to go on from a checkpoint."""

    checkpoint: str
    redrawn: tuple[int, ...]  # parameters, by the order of their making, to spoil before the checkpoint is loaded
    steps_before: int  # steps of the run that wrote it
    files: tuple[str, ...] = ()  # of its own; `checkpoint` is then the folder of that run, whose files are all there


@dataclass
class Written:
    """A checkpoint of the script's own."""

    steps: int
    batches: int
    files: list[str] = field(default_factory=list)  # relative to the working directory
    held: dict[str, float] = field(default_factory=dict)  # the share that it holds of each kind that there is


@dataclass
class Checkpoints:
    """What a process writes down."""

    saves: list[int] = field(default_factory=list)  # steps done at each call of `save`
    saved: dict[str, Any] = field(default_factory=dict)  # the state where the checkpoint was written
    resumed: dict[str, Any] = field(default_factory=dict)  # before the first batch or call after it was read
    models: int = 0  # that are trained
    written: list[Written] = field(default_factory=list)
    read: bool = False  # a file of the checkpoint, before the first step


def resumed(runs: Runs) -> Iterator[Verdict]:
    """Stop after an epoch, and inside each later one; for a script with calls, at two of its calls of `save`."""
    own = runs.own()
    ranks = min(max(own.script.ranks, runs.plan.ranks), _MOST_RANKS)
    own = runs.run(ranks=ranks)[0]
    drawn = drawn_parameters(runs, ranks)
    if own.script.is_lightning:
        batches, window = own.reading.batches_of_epoch, own.script.accumulation
        epochs = own.reading.epochs_begun
        after = Interruption(runs, f"{NAME} after epoch 1", ranks, drawn, StopAt(1, "epoch")).verdict()
        if epochs > 1 or batches == 1:
            yield after
        is_usual = own.script.saves_inside or after.outcome == "fail"
        for epoch in range(min(1, epochs - 1), epochs if batches > 1 else 0):
            inside = epoch * batches + window * max(1, (batches + 1) // 2 // window)
            verdict = Interruption(runs, f"{NAME} inside epoch {epoch + 1}", ranks, drawn, StopAt(inside)).verdict()
            yield unused(verdict, "" if is_usual else "the script writes no checkpoint inside an epoch")
        return
    yield from judged_at(runs, partial(_at_calls_of_save, ranks=ranks, drawn=drawn))


def _at_calls_of_save(runs: Runs, ranks: int, drawn: tuple[int, ...]) -> Iterator[Verdict]:
    """Stop a plain script after a third and two thirds of its calls."""
    whole = runs.run(ranks=ranks)[0]
    steps = whole.part(Checkpoints).saves
    between = [number for number, done in enumerate(steps, start=1) if 0 < done < whole.steps]
    if not between:
        raise NotJudgedError("relations.save() is not called between the first step and the last: call it earlier")
    for number in [number for number in thirds(len(steps)) if number in between] or between[-1:]:
        yield Interruption(runs, f"{NAME} after {steps[number - 1]} steps", ranks, drawn, StopAt(number)).verdict()


def judged_at(runs: Runs, places: Callable[[Runs], Iterator[Verdict]]) -> Iterator[Verdict]:
    """The verdicts at all places; with whole epochs if it fails with cut ones, from which it may compute its place."""
    failed = [*places(runs)]
    batches, limits = runs.own().reading.cut_from, runs.plan.limits
    if not batches or not any(verdict.has_other_samples for verdict in failed):
        yield from failed
        return
    steps = max(limits.steps, _EPOCHS * batches)
    if batches <= limits.steps:
        with suppress(RunTimeoutError):
            whole = [*places(runs.with_limits(batches=batches, steps=steps))]
            yield from (replace(verdict, cut=f"all {batches} batches") for verdict in whole)
            return
    cut = f"if it counts on whole epochs, which were cut after {limits.batches} of {batches} batches, pass"
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


def thirds(count: int) -> list[int]:
    """The calls of `save` after a third and just behind two thirds, which is no epoch's end if each step calls it."""
    return sorted({max(1, count // 3), count * 2 // 3 + (count > _MANY) or 1}) if count else []


def drawn_parameters(runs: Runs, ranks: int) -> tuple[int, ...]:
    """Parameters that another seed draws otherwise. Those that come from a file need not be in a checkpoint."""
    own = runs.run(ranks=ranks)[0].first
    other = runs.run(ranks=ranks, seed=1, limits=replace(runs.plan.limits, steps=1))[0].first
    return tuple(place for place, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)


def _not_restored(lost: Difference) -> str:
    """In words, with the value at the checkpoint and the one after it was read."""
    kind, _, name = lost.name.partition("/")
    what = {"optimizer": "optimizer state", "settings": "setting of the optimizer"}.get(kind, kind)
    if isinstance(lost.one, float | int) and isinstance(lost.other, float | int):
        return f"{what} not restored: {name} was {lost.one:.9g} at the checkpoint, and is {lost.other:.9g} after it"
    return f"{what} not restored: {name} is not what it was at the checkpoint"


class _ResumeError(RunError):
    """The training ended by an error when it was resumed."""


@dataclass
class Interruption:
    """A training that is stopped at one place, and goes on in new processes."""

    runs: Runs
    name: str
    ranks: int
    drawn: tuple[int, ...]
    stop: StopAt

    def verdict(self) -> Verdict:
        """Judge the training as it is; where it differs, with generators that follow the step: only state can then."""
        begun, whole = (self.runs.run(ranks=self.ranks, asks=asks)[0] for asks in (self.stop, None))
        if begun.steps >= whole.steps:
            remedy = ": pass a higher --steps, --epochs or --batches" if whole.cuts else ""
            return Verdict(self.name, "abstain", f"no step follows in {whole.steps} steps{remedy}")
        try:
            as_it_is = self._judged()
        except _ResumeError as error:
            return Verdict(self.name, "fail", f"the resumed training: {error}")
        if as_it_is.outcome != "fail":
            return as_it_is
        if self.drawn and (unspoilt := replace(self, drawn=())._judged()).outcome != "fail":
            text = f"equal only because the same seed draws what the checkpoint does not hold ({as_it_is.text})"
            return replace(unspoilt, outcome="note", text=text)
        verdict = self._judged(seeded_by_step=True)
        if verdict.outcome == "pass":
            text = "equal only if random generators are set alike: a checkpoint does not hold their states"
            return replace(verdict, outcome="note", text=f"{text} ({as_it_is.text})")
        (begun, *_), (ended, *_) = self.halves(seeded_by_step=True)
        if begun.script.is_lightning and begun.reading.epochs and self.stop.after == "batch":
            if len(begun.reading.lengths) > 1:
                text = f"in the middle of an epoch of several loaders, the order cannot be given: {as_it_is.text}"
                return replace(verdict, outcome="abstain", text=text)
            with_samples = self._judged_with_samples()
            if with_samples.outcome == "pass":
                text = (
                    "equal but for the samples: Lightning begins the order of an epoch anew, if its loader has no state"
                )
                return replace(verdict, outcome="note", text=f"{text} ({as_it_is.text})")
            if replace(self, stop=replace(self.stop, after="hooks"))._judged_with_samples().outcome == "pass":
                text = f"{_LATE} ({with_samples.text})"
                return replace(with_samples, outcome="note", text=text)
            verdict = with_samples
        if verdict.outcome != "fail":
            return verdict
        saved, resumed = begun.part(Checkpoints).saved, ended.part(Checkpoints).resumed
        had, has = (any(name.startswith("optimizer/") for name in state) for state in (saved, resumed))
        if had and not has:
            text = "optimizer state not restored: there is none after the checkpoint was read"
            return replace(verdict, text=f"{text}; in the end {verdict.text}")
        both = [{name: state[name] for name in saved.keys() & resumed.keys()} for state in (saved, resumed)]
        if lost := self.runs.differences(*both, leave_out=(*_LEFT_OUT, "kept/val")):
            return replace(verdict, text=f"{_not_restored(lost[0])}; in the end {verdict.text}")
        return verdict

    def _judged(self, *, seeded_by_step: bool = False) -> Verdict:
        whole = self.runs.run(ranks=self.ranks, seeded_by_step=seeded_by_step)
        return self._compared(whole, *self.halves(seeded_by_step=seeded_by_step))

    def _judged_with_samples(self) -> Verdict:
        """Give the second half the samples that come next."""
        recorded = {"ranks": self.ranks, "record": True, "seeded_by_step": True}
        first, _ = self.halves(seeded_by_step=True)
        *before, begun = first[0].reading.epochs
        skip = begun - (self.stop.after == "hooks")
        imposed = self.runs.imposed(recorded, first_epoch=len(before), skip=skip)
        return self._compared(self.runs.run(**recorded), *self.halves(seeded_by_step=True, imposed=imposed))

    def halves(self, *, seeded_by_step: bool, imposed: Imposed | None = None) -> tuple[list[Trace], list[Trace]]:
        """The run that writes a checkpoint, and the one that reads it."""
        same: dict[str, Any] = {"ranks": self.ranks, "seeded_by_step": seeded_by_step}
        stopped = {**same, "asks": self.stop}
        begun = self.runs.run(**stopped)
        changes = self.goes_on(begun, self.runs.folder_of(**stopped))
        try:
            return begun, self.runs.run(**same, **changes, imposed=imposed)
        except RunError as error:
            raise _ResumeError(str(error)) from None

    def goes_on(self, begun: list[Trace], folder: Path) -> dict[str, Any]:
        """The changes of the run that goes on from the one in the folder."""
        if not any(folder.glob(f"{CHECKPOINT}*")):
            raise RunError("its end, before a checkpoint was written where relations.save() said")
        return {"asks": GoOn(str(folder / CHECKPOINT), self.drawn, begun[0].steps)}

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
            models, then = of_whole.part(Checkpoints).models, ended.part(Checkpoints).models
            others = f"it trains {models} models, and {then} after it was resumed"
            verdicts.append(unused(verdict, others if 0 < then != models else ""))
        return next((verdict for verdict in verdicts if verdict.outcome == "fail"), verdicts[0])
