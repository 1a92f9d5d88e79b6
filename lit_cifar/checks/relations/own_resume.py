"""A plain script is resumed by its own means: from what it has written, by the flag that it has or that we are told."""

import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lit_cifar.checks.relations import interruption
from lit_cifar.checks.relations.flags import Flag
from lit_cifar.checks.relations.interruption import PASTE, Checkpoints, Interruption, StopAt, Written
from lit_cifar.checks.relations.plan import GoOn, Trace
from lit_cifar.checks.relations.runs import NotJudgedError, Runs
from lit_cifar.checks.verdict import Verdict
from lit_cifar.errors import printable

CHECKPOINT = "{checkpoint}"  # stands for it in a command
_LONGEST = 200  # characters of an error
_MEANS_RESUMING, _MAY_MEAN_IT = {"resume", "restore", "continue"}, {"checkpoint", "ckpt", "load"}
_BESIDE = {"auto", "checkpoint", "ckpt", "dir", "file", "folder", "from", "last", "latest", "path", "state", "training"}


@dataclass(frozen=True)
class Way:
    """How the script may go on: by arguments behind its own, with the checkpoint's name of this number in them."""

    words: tuple[str, ...] = ()
    number: int = 0
    is_sure: bool = True  # else what it names may be weights to begin with

    def given(self, written: Written) -> tuple[str, ...]:
        *_, name = _names(written)[: self.number + 1]
        return tuple(word.replace(CHECKPOINT, name) for word in self.words)


def resumed(runs: Runs, by: str = "") -> Iterator[Verdict]:
    """As `interruption.resumed`; a plain script without calls goes on by itself, or with the arguments `by`."""
    script = runs.own().script
    if script.is_lightning and by:
        raise NotJudgedError("--resume-by has no effect with Lightning, whose Trainer resumes")
    if script.is_lightning or ({"resume", "save"} <= script.calls.keys() and not by):
        yield from interruption.resumed(runs)
        return
    first, *_ = places = [*_places(runs, Way())]
    ways = [*(_with_names(shlex.split(by), first.written) if by else guessed(script.flags, first.written))]
    if way := next((way for fails in (False, True) for way in ways if replace(first, way=way).works(fails)), None):
        yield from interruption.judged_at(runs, partial(_places, way=way))
        return
    if lacks := places[-1].lacks:
        yield Verdict("checkpoint", "note", f"{lacks}: a training that goes on from it would begin them anew")
    ended = [replace(first, way=way)._as_they_ended()[1] for way in ways]
    reasons = [f" ({printable(trace.end.error)[:_LONGEST]})" for trace in reversed(ended) if trace.end.error]
    reasons += [trace.part(Checkpoints).say_earlier() for trace in ended]
    reason = next(filter(None, reasons), "")
    text = f"its checkpoint {printable(_names(first.written)[0])} is not read by a new process{reason}"
    raise NotJudgedError(f"{text}: say how it resumes, such as --resume-by='--resume {CHECKPOINT}'")


def guessed(flags: dict[str, Flag], written: Written) -> Iterator[Way]:
    """First without an argument, then by flags whose names mean it."""
    yield Way()
    for flag in flags.values():
        names = [{*name.split("_")} for name in flag.names]
        known = [words for words in names if words <= _MEANS_RESUMING | _MAY_MEAN_IT | _BESIDE]
        is_sure = any(words & _MEANS_RESUMING for words in known)
        if not is_sure and not any(words & _MAY_MEAN_IT for words in known):
            continue
        if not flag.takes_value or flag.kind == "bool":
            yield Way(flag.given(True), is_sure=is_sure)
        elif flag.kind not in ("int", "float"):
            yield from (replace(way, is_sure=is_sure) for way in _with_names(flag.given(CHECKPOINT), written))


def _with_names(words: Iterable[str], written: Written) -> Iterator[Way]:
    return (Way(tuple(words), number) for number in range(len(_names(written))))


def _names(written: Written) -> list[str]:
    """What a command may call a checkpoint, the likeliest first: its file, or the folder of several."""
    folder, files = os.path.commonpath([Path(name).parent for name in written.files]), written.files[:3]
    return [*files, folder or "."] if len(files) == 1 or not folder else [folder, *files]


def _places(runs: Runs, way: Way) -> Iterator["_Resumption"]:
    """Where to stop: behind two of the checkpoints that it writes."""
    whole = runs.own()
    if runs.plan.ranks > 1:
        raise NotJudgedError("it trains on two processes alone, where only calls are understood", PASTE)
    written = whole.part(Checkpoints).written
    # Where there are fewer files, one to go on from may lack; at the end there may be more, as one of weights alone.
    most = max((len(place.files) for place in written if place.steps < whole.steps), default=0)
    places = [place for place in written if place.files and len(place.files) >= most]
    if not (numbers := interruption.chosen([place.steps for place in places], whole.steps)):
        text = f"it writes no checkpoint before its last step ({whole.steps}): let it, by arguments after a --"
        raise NotJudgedError(text, PASTE)
    for place in (places[number] for number in numbers):
        name, stop = f"{interruption.NAME} after {place.steps} steps", StopAt(place.steps, "write", place.batches)
        yield _Resumption(runs, name, stop, interruption.drawn(runs), written=place, way=way)


@dataclass(kw_only=True)
class _Resumption(Interruption):
    """A training that is stopped behind a checkpoint of its own, and goes on from that in its own way."""

    written: Written
    way: Way
    last: int | None = None  # step of the training without a stop, if a resumed one would go on

    @property
    def lacks(self) -> str:
        """In words, what of the training the checkpoint does not hold."""
        shares = self.written.held.items()
        lost = [f"{'only a part of the' if share else 'no'} {kind}" for kind, share in shares if share < 1]
        return f"its checkpoint {printable(_names(self.written)[0])} holds {' and '.join(lost)}" if lost else ""

    def works(self, fails: bool) -> bool:
        """Whether the script reads the checkpoint before its first step, and if that is not sure an optimizer from it.

        `fails` is whether it may end by an error, which can ask for another name of the file.
        """
        _, ended = self._as_they_ended()
        noted = ended.part(Checkpoints)
        goes_on = self.way.is_sure or any(name.startswith("optimizer/") for name in noted.resumed)
        return noted.read and goes_on and (fails or not ended.end.error)

    def _as_they_ended(self) -> tuple[Trace, Trace]:
        """Both halves of the training as it is, of which the second may have ended by an error."""
        begun = self.runs.own(asks=self.stop)
        return begun, self.runs.ended(**self.goes_on(begun))[0]

    def goes_on(self, begun: Trace) -> dict[str, Any]:
        place = self.written.steps, self.written.batches  # it may write more when it is ended
        written = next(own for own in begun.part(Checkpoints).written if (own.steps, own.batches) == place)
        plan, files = self.runs.plan, tuple(written.files)
        return {
            "asks": GoOn(str(begun.folder.parent), self.redrawn, begun.steps, files),
            "arguments": (*plan.arguments, *self.way.given(written)),
            "limits": replace(plan.limits, steps=self.last or plan.limits.steps),
        }

    def halves(self) -> tuple[list[Trace], list[Trace]]:
        begun, ended = super().halves()
        if not ended[0].part(Checkpoints).read:
            raise NotJudgedError(f"its checkpoint after {begun[0].steps} steps is not read, though an earlier one is")
        return begun, ended

    def verdict(self) -> Verdict:
        begun, ended = self._as_they_ended()
        last = self.runs.own().steps
        if self.last is None and begun.steps + ended.steps > last:
            cut = replace(self, last=last).verdict()
            text = "; ".join(filter(None, (f"the resumed training goes on after step {last}", cut.text)))
            return cut if cut.outcome == "fail" else replace(cut, outcome="note", text=text)
        verdict = super().verdict()
        lacks = self.lacks if verdict.outcome == "fail" else ""
        return replace(verdict, text="; ".join(filter(None, (lacks, verdict.text))))
