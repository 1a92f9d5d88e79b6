"""Options that may not change what is trained."""

import shlex
from collections.abc import Callable, Iterator
from typing import Any

from lit_cifar.checks.relations.in_lightning import FOLLOWS_EVALUATION
from lit_cifar.checks.relations.loaders import CUT
from lit_cifar.checks.relations.runs import Runs, Verdict

_SCALE = 2.0**-6
_TRAINED = ("weights", "buffers", "optimizer")


def often(runs: Runs) -> Iterator[Verdict]:
    """Validate and log more often."""
    name, own = "validating more often", runs.run(generators=True)[0]
    why = ""
    changes: dict[str, Any] = {}
    if own.is_lightning:
        changes = {"trainer": (("val_check_interval", 0.5), ("check_val_every_n_epoch", 1), ("log_every_n_steps", 1))}
        if not own.logged:
            why = "no validation"
        elif FOLLOWS_EVALUATION in own.remarks:
            why = FOLLOWS_EVALUATION
    elif "validate_every" in own.asked:
        value = int(own.asked["validate_every"])
        changes = {"knobs": (("validate_every", value // 2 if value > 1 else 2),)}
    else:
        why = 'write relations.knob("validate_every", N) for the steps or epochs between evaluations'
    if why:
        yield Verdict(name, "abstain", why)
        return
    yield runs.judge(name, own, runs.run(generators=True, **changes)[0], kinds=_TRAINED)


def scale(runs: Runs) -> Iterator[Verdict]:
    """Begin with a smaller scale of the loss: a power of two, which rounds nothing."""
    own = runs.run(generators=True)[0]
    changes: dict[str, Any] = {"scale": _SCALE}
    if value := own.asked.get("loss_scale"):
        changes["knobs"] = (("loss_scale", value * _SCALE),)
    if own.scales or value:
        yield runs.judge("scale of the loss", own, runs.run(generators=True, **changes)[0], kinds=_TRAINED)


def unchanged(words: str) -> Callable[[Runs], Iterator[Verdict]]:
    """A relation: these further arguments of the script change nothing that it trains or reports."""

    def relation(runs: Runs) -> Iterator[Verdict]:
        own, other = runs.own(), runs.run(arguments=tuple(shlex.split(words)))[0]
        verdict = runs.judge(f"same with {words}", own, other)
        if verdict.outcome == "fail" and (own.is_cut or other.is_cut):
            verdict = Verdict(verdict.relation, "abstain", CUT)
        yield verdict

    return relation
