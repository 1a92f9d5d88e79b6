"""A checkpoint has the results that were logged when it was written."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lit_cifar.checks.compare import difference
from lit_cifar.checks.relations.evaluation import validated
from lit_cifar.checks.relations.runs import Runs
from lit_cifar.checks.verdict import Verdict

VALIDATED = "validated.ckpt"  # in the folder of the process


@dataclass(frozen=True)
class KeepValidated:
    """Asks Lightning's Trainer for a checkpoint after each validation, of which the last stays."""


def rescored(runs: Runs) -> Iterator[Verdict]:
    """Validate the last checkpoint by a new process; for a script with calls, compare what it reports."""
    own = runs.own()
    if own.script.is_lightning:
        yield from _rescored_in_lightning(runs)
        return
    numbers = {name: value for _, values in own.logged for name, value in values.items()}
    pairs = [
        (name, again)
        for name in numbers
        if name.startswith("score") and (again := numbers.get(f"re{name.replace('score', 'scored', 1)}")) is not None
    ]
    if not pairs:
        text = "relations.report(score=...), and rescored=... of the model that is loaded from the file"
        yield Verdict("score of a file", "abstain", text)
        return
    for name, again in pairs:
        is_same = difference(numbers[name], again) <= runs.limit
        text = "" if is_same else f"{name} was {numbers[name]:.9g} when it was kept, and is {again:.9g}"
        yield Verdict("score of a file", "pass" if is_same else "fail", text, f"{len(pairs)} scores")


def _rescored_in_lightning(runs: Runs) -> Iterator[Verdict]:
    run = runs.run(asks=KeepValidated())[0]
    if not run.logged:
        yield Verdict("score of a file", "abstain", "no validation")
        return
    file = runs.folder_of(asks=KeepValidated()) / "0" / VALIDATED
    again = validated(runs, str(file))
    history = [values for _, values in run.logged]
    found: list[str] = []
    notes: list[str] = []
    for name, value in again.items():
        if name not in history[-1] or difference(history[-1][name], value) <= runs.limit:
            continue
        text = f"{name} was logged as {history[-1][name]:.9g}, and is {value:.9g} where the checkpoint is validated"
        (notes if _is_running(name, history) else found).append(text)
    outcome: Any = "fail" if found else "note" if notes else "pass"
    why = "; ".join(found[:2]) or "; ".join(f"{text}: it is the best so far" for text in notes[:2])
    yield Verdict("score of a file", outcome, why, ", ".join(again), found)


def _is_running(name: str, history: list[dict[str, float]]) -> bool:
    """Whether a metric is the best of another until then, which a single evaluation cannot know."""
    own = [values.get(name) for values in history]
    for other in history[-1].keys() - {name}:
        series = [values.get(other, 0.0) for values in history]
        for best in (max, min):
            if own == [best(series[: end + 1]) for end in range(len(series))]:
                return True
    return False
