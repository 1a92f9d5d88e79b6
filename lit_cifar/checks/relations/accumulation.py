"""Microbatches train what one batch of all trains."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lit_cifar.checks.compare import differences
from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.plan import Trace
from lit_cifar.checks.relations.ranks import LEFT_OUT, weighed
from lit_cifar.checks.relations.runs import NotJudgedError, Runs, are_same_samples, unused
from lit_cifar.checks.verdict import Verdict

_PASTE = 'accumulate = relations.knob("accumulate", accumulate)  # microbatches of a step'
_PASTE_SIZE = 'size = relations.knob("batch_size", size)  # samples of a microbatch'


def accumulation(runs: Runs) -> Iterator[Verdict]:
    """Train with microbatches; then with one batch of all."""
    own = runs.own()
    script = own.script
    if script.is_lightning and remarks.MANUAL in own.remarks:
        raise NotJudgedError(remarks.MANUAL)
    if "accumulate" not in script.knobs:
        raise NotJudgedError("nothing says how many microbatches a step has", _PASTE)
    pair = _Pair(runs)
    verdict = pair.verdict()
    if verdict.outcome == "fail" and own.reading.batches and {"accumulate", "batch_size"} <= script.by_flag.keys():
        sized = replace(pair, is_sized=True)
        if (other := sized.verdict()).outcome != "fail":
            pair, verdict = sized, other
    if verdict.outcome == "fail" and script.window > 1 and len(own.reading.lengths) == 1:
        verdict = pair.without_rest(verdict)
    if "accumulate" in script.by_flag and own.reading.batches:
        verdict = pair.judged_by_flag(script.by_flag["accumulate"].words[-1], verdict)
    yield weighed(verdict, [*pair.traces()], "" if script.window > 1 else "the script does not accumulate")


@dataclass(frozen=True)
class _Pair:
    """Two runs whose steps have the same samples: in one batch, and in microbatches, two if the script has none."""

    runs: Runs
    is_even: bool = False  # batches that the script divides are cut, so that all microbatches have as many samples
    is_sized: bool = False  # their size is given by the script's flag too, as a setting such as the rate may follow it

    @property
    def micro(self) -> int:
        """Microbatches of a step of the script."""
        return self.runs.own().script.window

    def verdict(self) -> Verdict:
        said = f"{max(self.micro, 2)} microbatches: "
        return self.runs.judge("accumulation", *self.traces(), leave_out=LEFT_OUT, samples=False, said=said)

    def without_rest(self, failed: Verdict) -> Verdict:
        """The failure; what is said of it if the training holds without what is left over at the end of its epochs."""

        def holds(batches: int, **which: bool) -> bool:
            if batches < 1:
                return False
            return replace(self, runs=self.runs.with_limits(batches=batches), **which).verdict().outcome != "fail"

        reading = self.runs.own().reading
        (length,) = reading.lengths.values()
        is_whole = not reading.cut
        micro = self.micro
        if holds(length, is_even=True) or (is_whole and holds(length - micro)):
            text = f"equal only if all microbatches have as many samples: one of fewer counts as much ({failed.text})"
            return replace(failed, outcome="note", text=text)
        if not length % micro or not holds((length - is_whole) // micro * micro):
            return failed
        rest = f"{length % micro} of {micro} microbatches, with which an epoch ends"
        whole, divided = self.traces()
        if len(whole.norms) != len(divided.norms):
            return replace(failed, outcome="note", text=f"no step of their own is made by {rest} ({failed.text})")
        return replace(failed, text=f"only a last window differs, of {rest}: {failed.text}")

    def judged_by_flag(self, flag: str, verdict: Verdict) -> Verdict:
        """The verdict; one that blames nobody where the flag seems to mean something else than microbatches."""
        whole, divided = self.traces()
        if verdict.outcome == "fail" and whole.steps != divided.steps:
            raise NotJudgedError(f"another {flag} makes other steps", _PASTE)
        if not differences(whole.state, divided.state):
            raise NotJudgedError(f"another {flag} changes nothing", _PASTE)
        is_divided = verdict.outcome == "fail" and self._divides_batches()
        return unused(verdict, f"if {flag} divides each batch" if is_divided else "")

    def traces(self) -> tuple[Trace, Trace]:
        """With one batch to a step, and with microbatches."""
        own = self.runs.own()
        script = own.script
        if "batch_size" in script.calls or ("batch_size" in script.by_flag and not own.reading.batches):
            whole, divided = self._by_knobs(int(script.knobs["batch_size"]) * self.micro)
            is_other = script.by_flag and self.runs.differences(whole.state, divided.state, kinds=("settings",))
            if are_same_samples(whole.samples, divided.samples) and not is_other:
                return whole, divided
        if not own.reading.batches:  # a step may have the same samples, however many microbatches there are
            whole, divided = self._by_knobs()
            if not are_same_samples(whole.samples, divided.samples):
                raise NotJudgedError(f"{remarks.NO_LOADER}, and each step has other samples", _PASTE_SIZE)
            return whole, divided
        if remarks.UNDIVIDED in own.remarks:
            raise NotJudgedError(remarks.UNDIVIDED)
        return self._of_recorded()

    def _of_recorded(self) -> tuple[Trace, Trace]:
        """Both read the batches that the script reads: divided by itself, joined, or in halves."""
        script, quiet = self.runs.own().script, self.runs.planned(quiet=True)
        batches = self.runs.plan.limits.batches
        size = int(script.knobs["batch_size"]) if self.is_sized else 0
        if not script.is_lightning and not self.is_sized and self._divides_batches():
            number = max(self.micro, 2)
            same = quiet.imposed(multiple=number if self.is_even else 1)
            return self._run(1, imposed=same), self._run(number, imposed=same)
        if self.micro > 1:
            joined = quiet.imposed(window=self.micro)
            return self._run(1, -(-batches // self.micro), size * self.micro, imposed=joined), quiet.own(record=True)
        halves = quiet.imposed(parts=2, multiple=2)
        whole = quiet.own(imposed=replace(halves, parts=1))
        return whole, self._run(2, 2 * batches, -(-size // 2), imposed=halves)

    def _by_knobs(self, size: int = 0) -> tuple[Trace, Trace]:
        """One batch to a step, of `size` samples if it is given; and microbatches, fewer in a last step."""
        number = max(self.micro, 2)
        windows = -(-self.runs.plan.limits.batches // number)
        return self._run(1, windows, size), self._run(number, windows * number, size // number)

    def _run(self, number: int, batches: int = 0, size: int = 0, **changes: Any) -> Trace:
        """A run in which `number` batches make a step, of so many samples if it is said; an epoch has `batches`."""
        limits = self.runs.plan.limits
        changes["limits"] = limits = replace(limits, batches=batches or limits.batches)
        changes["knobs"] = (("accumulate", number), *([("batch_size", size)] if size else []))
        if self.runs.own().script.is_lightning:
            changes["trainer"] = (("limit_train_batches", limits.batches),)
        return self.runs.own(quiet=True, **changes)

    def _divides_batches(self) -> bool:
        """Whether the script makes its microbatches of each batch: then a batch has as many steps with them as without.

        Each of several optimizers makes steps, and a run may end by their number.
        """
        own, other = self.runs.own(), self._run(1 if self.micro > 1 else 2)
        return other.steps * own.reading.batches == own.steps * other.reading.batches
