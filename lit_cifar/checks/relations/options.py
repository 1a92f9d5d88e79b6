"""Options that may not change what is trained: how often it is validated, the scale of the loss, others of a script."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lit_cifar.checks.relations.evaluation import CUT, Evaluations
from lit_cifar.checks.relations.remarks import FOLLOWS_EVALUATION
from lit_cifar.checks.relations.runs import TRAINED, RunError, Runs, unused
from lit_cifar.checks.verdict import Verdict

_SCALE = 2.0**-6


@dataclass(frozen=True)
class ScaleLoss:
    """Asks a `GradScaler` to begin with so much of the scale that the script chooses."""

    factor: float


def validated_more_often(runs: Runs) -> Iterator[Verdict]:
    """Validate and log more often."""
    name, own = "validating more often", runs.run(seeded_by_step=True)[0]
    why = paste = ""
    changes: dict[str, Any] = {}
    if own.script.is_lightning:
        changes = {"trainer": (("val_check_interval", 0.5), ("check_val_every_n_epoch", 1), ("log_every_n_steps", 1))}
        if not own.logged:
            why = "no validation"
        elif FOLLOWS_EVALUATION in own.remarks:
            why = FOLLOWS_EVALUATION
    elif "validate_every" in own.script.calls:
        value = int(own.script.calls["validate_every"])
        changes = {"knobs": (("validate_every", value // 2 if value > 1 else 2),)}
    else:
        why = "nothing says how often it evaluates"
        paste = 'every = relations.knob("validate_every", every)  # steps or epochs between evaluations'
    if why:
        yield Verdict(name, "abstain", why, paste=paste)
        return
    verdict = runs.judge(name, own, runs.run(seeded_by_step=True, **changes)[0], kinds=TRAINED)
    if verdict.outcome == "fail" and own.script.is_lightning:
        without = runs.run(seeded_by_step=True, trainer=(("limit_val_batches", 0),))[0]
        own_places = runs.judge(name, own, without, kinds=TRAINED)
        verdict = unused(verdict, "" if own_places.outcome == "fail" else "where the script validates, nothing changes")
    yield verdict


def with_smaller_scale(runs: Runs) -> Iterator[Verdict]:
    """Begin with a smaller scale of the loss: a power of two, which rounds nothing."""
    same: dict[str, Any] = {"seeded_by_step": True}
    why = ""
    own = runs.run(**same)[0]
    amp = own.script.by_flag.get("amp")
    if not own.script.scales_loss and amp and not amp.value:
        why = f"the script is started without {amp.words[-1]}"
        with_amp = {**same, "knobs": (("amp", True),)}
        with suppress(RunError):  # it may need a GPU
            own, same = runs.run(**with_amp)[0], with_amp
    changes: dict[str, Any] = {"asks": ScaleLoss(_SCALE)}
    if value := own.script.calls.get("loss_scale"):
        changes["knobs"] = (("loss_scale", value * _SCALE),)
    if own.script.scales_loss or value:
        other = runs.run(**same | changes)[0]
        yield unused(runs.judge("scale of the loss", own, other, kinds=TRAINED), why)


def with_further_arguments(words: str) -> Callable[[Runs], Iterator[Verdict]]:
    """A relation: these arguments of the script change nothing that it trains or reports."""

    def relation(runs: Runs) -> Iterator[Verdict]:
        own, other = runs.own(), runs.run(arguments=tuple(shlex.split(words)))[0]
        verdict = runs.judge(f"same with {words}", own, other)
        if verdict.outcome == "fail" and any(trace.part(Evaluations).cut for trace in (own, other)):
            verdict = Verdict(verdict.relation, "abstain", CUT)
        yield verdict

    return relation
