"""A training that is interrupted and resumed ends as one that is not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from lit_cifar.checks.compare import Difference
from lit_cifar.checks.relations.plan import GoOn, Imposed, Trace
from lit_cifar.checks.relations.runs import NotJudgedError, RunError, Runs, unused
from lit_cifar.checks.verdict import Verdict
from lit_cifar.errors import printable

NAME = "resume"
CHECKPOINT = "checkpoint"  # in the folder of the run, for all ranks; a script may add to the name
Moment: TypeAlias = Literal["batch", "hooks", "epoch", "write"]  # "hooks": all of a batch, so when the next begins
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
    earlier: str = ""  # the first file like a checkpoint that was read by then, and there before the run

    def say_earlier(self) -> str:
        """For whoever finds no checkpoint that is read, or no step that is made."""
        text = f" (it reads {printable(self.earlier)}: move that away if an earlier training has left it)"
        return text if self.earlier else ""


def resumed(runs: Runs) -> Iterator[Verdict]:
    """Stop after an epoch, and inside each later one; for a script with calls, at two of its calls of `save`."""
    script = runs.own().script
    runs = runs.planned(ranks=min(2, max(script.ranks, runs.plan.ranks)))
    if not script.is_lightning:
        yield from judged_at(runs, _at_calls_of_save)
        return
    batches, epochs = (reading := runs.own().reading).batches_of_epoch, reading.epochs_begun
    after = Interruption(runs, f"{NAME} after epoch 1", StopAt(1, "epoch"), drawn(runs)).verdict()
    if epochs > 1 or batches == 1:
        yield after
    is_usual = script.saves_inside or after.outcome == "fail"
    for epoch in range(min(1, epochs - 1), epochs if batches > 1 else 0):
        inside = epoch * batches + script.window * max(1, (batches + 1) // 2 // script.window)
        verdict = Interruption(runs, f"{NAME} inside epoch {epoch + 1}", StopAt(inside), drawn(runs)).verdict()
        yield unused(verdict, "" if is_usual else "the script writes no checkpoint inside an epoch")


def _at_calls_of_save(runs: Runs) -> Iterator["Interruption"]:
    """Stop a plain script at two of its calls."""
    whole = runs.own()
    saves = whole.part(Checkpoints).saves
    if not (calls := chosen(saves, whole.steps)):
        raise NotJudgedError("relations.save() is not called between the first step and the last: call it earlier")
    for call in calls:
        yield Interruption(runs, f"{NAME} after {saves[call]} steps", StopAt(call + 1), drawn(runs))


def chosen(steps: Sequence[int], last: int) -> list[int]:
    """Of places behind so many steps, those just above a third and two thirds along, if more steps follow."""
    between = [place for place, done in enumerate(steps) if 0 < done < last]
    above = len(steps) > 5  # perhaps in each step, when a third may be the end of an epoch: another one follows
    wanted = {max(0, len(steps) // 3 - 1 + above), max(0, len(steps) * 2 // 3 - 1)}
    return [place for place in between if place in wanted] or between[-1:]


def drawn(runs: Runs) -> tuple[int, ...]:
    """Parameters that another seed draws otherwise. Those that come from a file need not be in a checkpoint."""
    other = runs.with_limits(steps=1).own(seed=1)
    pairs = enumerate(zip(runs.own().first, other.first, strict=False))
    return tuple(place for place, (one, another) in pairs if one != another)


def judged_at(runs: Runs, places: Callable[[Runs], Iterator["Interruption"]]) -> Iterator[Verdict]:
    """The verdicts at all places; with whole epochs if it fails with cut ones, from which it may compute its place."""
    verdicts = [place.verdict() for place in places(runs)]
    batches, limits = runs.own().reading.cut_from, runs.plan.limits
    if batches and any(verdict.may_be_cut for verdict in verdicts):
        steps = max(limits.steps, 3 * batches)  # with epochs in which it is stopped twice
        cut = f"if it counts on whole epochs, which were cut after {limits.batches} of {batches} batches, pass"
        for verdict in verdicts:
            if verdict.may_be_cut:
                verdict.outcome = "note"
                verdict.text += f"; {cut} --batches={batches} --steps={steps}"
        if batches <= limits.steps:
            with suppress(RunError):  # there may be no time for it
                whole = [place.verdict() for place in places(runs.with_limits(batches=batches, steps=steps))]
                verdicts = [replace(verdict, cut=f"all {batches} batches") for verdict in whole]
    yield from verdicts


def _samples(whole: Trace, begun: Trace, ended: Trace) -> list[list[int]]:
    """The samples of each step of both halves; a step that was begun before the checkpoint may be ended after it."""
    before = [*begun.samples, *([] for _ in range(begun.steps))][: begun.steps]
    of_step = [sample for step in begun.samples[begun.steps :] for sample in step]
    after = ended.samples[0] if ended.samples else []
    if after and len(of_step) + len(after) == sum(map(len, whole.samples[begun.steps : begun.steps + 1])):
        return [*before, [*of_step, *after], *ended.samples[1:]]
    return [*before, *ended.samples]


def _not_restored(lost: Difference) -> str:
    """In words, with the value at the checkpoint and the one after it was read."""
    kind, _, name = lost.name.partition("/")
    what = {"optimizer": "optimizer state", "settings": "setting of the optimizer"}.get(kind, kind)
    if isinstance(lost.one, float | int) and isinstance(lost.other, float | int):
        return f"{what} not restored: {name} was {lost.one:.9g} at the checkpoint, and is {lost.other:.9g} after it"
    return f"{what} not restored: {name} is not what it was at the checkpoint"


@dataclass
class Interruption:
    """A training that is stopped at one place, and goes on in new processes."""

    runs: Runs
    name: str
    stop: StopAt
    redrawn: tuple[int, ...]  # parameters, as in `GoOn`
    imposed: Imposed | None = None  # batches of the second half

    def verdict(self) -> Verdict:
        """Judge the training as it is; where it differs, say why, or on what condition it does not."""
        begun, whole = self.runs.own(asks=self.stop), self.runs.own()
        if begun.steps >= whole.steps:
            remedy = ": pass a higher --steps, --epochs or --batches" if whole.cuts else ""
            return Verdict(self.name, "abstain", f"no step follows in {whole.steps} steps{remedy}")
        try:
            as_it_is = self._judged()
        except RunError as error:
            if error.end.is_late or error.end.outside:  # as by an absolute path that it has kept
                raise
            return Verdict(self.name, "fail", f"the resumed training: {error}")
        if as_it_is.outcome != "fail":
            return as_it_is
        seeded = replace(self, runs=self.runs.planned(seeded_by_step=True))  # then only the state can differ
        for condition, verdict in self._on_conditions(seeded):
            if verdict.outcome != "fail":
                is_open = verdict.outcome == "abstain"
                text = f"{condition} ({as_it_is.text})"
                return replace(verdict, outcome="abstain" if is_open else "note", text=text)
        return replace(verdict, text="; in the end ".join(filter(None, (seeded._lost(), verdict.text))))

    def _on_conditions(self, seeded: "Interruption") -> Iterator[tuple[str, Verdict]]:
        """In words, conditions on which it may not differ, and the verdicts under them. The last one has all."""
        if self.redrawn:
            unspoilt = replace(self, redrawn=())._judged()
            yield "equal only because the same seed draws what the checkpoint does not hold", unspoilt
        verdict = seeded._judged()
        yield "equal only if random generators are set alike: a checkpoint does not hold their states", verdict
        (begun, *_), _ = seeded.halves()
        if not (begun.script.is_lightning and begun.reading.epochs and self.stop.after == "batch"):
            return
        if len(begun.reading.lengths) > 1:
            text = "in the middle of an epoch of several loaders, the order cannot be given"
            yield text, replace(verdict, outcome="abstain")
        own = seeded._with_samples()._judged()
        yield "equal but for the samples: Lightning begins the order of an epoch anew, if its loader has no state", own
        late = "written when the next batch begins: Lightning's callbacks write it before the module's own"
        with_hooks = replace(seeded, stop=replace(self.stop, after="hooks"))._with_samples()._judged()
        yield f"equal only if the checkpoint is {late} on_train_batch_end", with_hooks

    def _lost(self) -> str:
        """In words, what is not as it was where the checkpoint was written, after it was read."""
        (begun, *_), (ended, *_) = self.halves()
        states = [begun.part(Checkpoints).saved, ended.part(Checkpoints).resumed]
        had, has = (any(name.startswith("optimizer/") for name in state) for state in states)
        if had and not has:
            return "optimizer state not restored: there is none after the checkpoint was read"
        both = [{name: state[name] for name in states[0].keys() & states[1].keys()} for state in states]
        lost = self.runs.differences(*both, leave_out=(*_LEFT_OUT, "kept/val"))
        return _not_restored(lost[0]) if lost else ""

    def _judged(self) -> Verdict:
        """The verdict of the first rank whose halves are not equal to its whole, or that of rank 0."""
        verdicts = []
        for rank, (of_whole, begun, ended) in enumerate(zip(self.runs.run(), *self.halves(), strict=True)):
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

    def _with_samples(self) -> "Interruption":
        """The same, whose second half is given the samples that come next."""
        (first, *_), _ = self.halves()
        *before, begun = first.reading.epochs
        skip = begun - (self.stop.after == "hooks")
        return replace(self, imposed=self.runs.imposed(first_epoch=len(before), skip=skip))

    def halves(self) -> tuple[list[Trace], list[Trace]]:
        """The run that writes a checkpoint, and the one that reads it."""
        begun = self.runs.run(asks=self.stop)
        return begun, self.runs.run(**self.goes_on(begun[0]), imposed=self.imposed)

    def goes_on(self, begun: Trace) -> dict[str, Any]:
        """The changes of a run that goes on from the one that was stopped."""
        folder = begun.folder.parent
        if not any(folder.glob(f"{CHECKPOINT}*")):
            raise NotJudgedError("a run ended before it wrote a checkpoint where relations.save() said")
        return {"asks": GoOn(str(folder / CHECKPOINT), self.redrawn, begun.steps)}
