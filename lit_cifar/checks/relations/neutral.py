"""Options that cost time or memory and may not change what is trained; and options that must."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lit_cifar.checks.relations import draws
from lit_cifar.checks.relations.in_lightning import FOLLOWS_EVALUATION
from lit_cifar.checks.relations.loaders import CUT
from lit_cifar.checks.relations.runs import Runs, Verdict, difference, is_own_number, unused

_OTHERS = ("accumulate", "batch_size", "evaluation_batch", "loss_scale", "validate_every")  # have their own relations
_SCALE = 2.0**-6
_TRAINED = ("weights", "buffers", "optimizer")
_STATISTICS = ("running_mean", "running_var")  # of BatchNorm
_TWICE = "each batch enters these statistics twice, which is right if their momentum was chosen for it"


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


def recomputation(runs: Runs) -> Iterator[Verdict]:
    """Keep activations that the script computes again in its backward pass."""
    own = runs.run(generators=True)[0]
    if not own.recomputes:
        return
    kept = runs.run(generators=True, keep_activations=True)[0]
    verdict = runs.judge("recomputation", own, kept)
    apart = runs.differences(own.state, kept.state, kinds=_TRAINED)
    if verdict.outcome == "fail" and apart and all(each.name.endswith(_STATISTICS) for each in apart):
        verdict = replace(verdict, outcome="note", text=f"{_TWICE}: {verdict.text}")
    yield verdict


def compiled(runs: Runs) -> Iterator[Verdict]:
    """Compile what the script compiles; in all other runs it is not compiled."""
    own = runs.run(quiet=True)[0]  # compiled code draws other random numbers
    if own.compiles:
        yield runs.judge("compile", own, runs.run(quiet=True, compiled=True)[0])


def scale(runs: Runs) -> Iterator[Verdict]:
    """Begin with a smaller scale of the loss: a power of two, which rounds nothing."""
    own = runs.run(generators=True)[0]
    changes: dict[str, Any] = {"scale": _SCALE}
    if value := own.asked.get("loss_scale"):
        changes["knobs"] = (("loss_scale", value * _SCALE),)
    if own.scales or value:
        yield runs.judge("scale of the loss", own, runs.run(generators=True, **changes)[0], kinds=_TRAINED)


def autocast(runs: Runs) -> Iterator[Verdict]:
    """Compute under autocast what the script does: it rounds values, and leaves steps, rates and types of weights."""
    if not runs.own().autocasts:
        return
    on, off = (runs.run(generators=True, double=False, autocast=own)[0] for own in (True, False))
    # A scaler leaves steps out in which gradients overflow, so that steps are made of other samples.
    verdict = runs.judge("autocast", on, off, kinds=("settings", "schedule"), samples=not on.scales)
    if on.scales and len(on.norms) != len(off.norms):
        verdict = Verdict("autocast", "pass", looked_at=f"types of {len(on.state)} tensors and numbers")
    both = [name for name in off.state if name.startswith(_TRAINED) and name in on.state]
    apart = [name for name in both if on.state[name].dtype != off.state[name].dtype]
    text = f"{apart[0]} is {on.state[apart[0]].dtype}, and {off.state[apart[0]].dtype} without" if apart else ""
    if on.moved < off.moved:
        text = f"{off.moved - on.moved} parameters never change, and do so without"
    yield replace(verdict, outcome="fail", text=text) if text and verdict.outcome == "pass" else verdict


def groups(runs: Runs) -> Iterator[Verdict]:
    """Give optimizers their groups of parameters in another order, or the parameters of a single group."""
    own, other = (runs.run(generators=True, regroup=regroup)[0] for regroup in (False, True))
    verdict = runs.judge("groups of parameters", own, other, kinds=("weights", "buffers"))
    if verdict.outcome == "fail" and draws.IN_OPTIMIZER in own.remarks:
        verdict = Verdict(verdict.relation, "abstain", draws.IN_OPTIMIZER)
    yield unused(verdict, "right where the script knows a group by its number" if own.groups > 1 else "")


def unchanged(words: str) -> Callable[[Runs], Iterator[Verdict]]:
    """A relation: these further arguments of the script change nothing that it trains or reports."""

    def relation(runs: Runs) -> Iterator[Verdict]:
        own, other = runs.own(), runs.run(arguments=tuple(shlex.split(words)))[0]
        verdict = runs.judge(f"same with {words}", own, other)
        if verdict.outcome == "fail" and (own.is_cut or other.is_cut):
            verdict = Verdict(verdict.relation, "abstain", CUT)
        yield verdict

    return relation


def effects(runs: Runs) -> Iterator[Verdict]:
    """Change each option of the script's own: a training that stays as it was, bit for bit, does not use it."""
    own = runs.run(generators=True)[0]
    for name, value in own.asked.items():
        if name in _OTHERS or not isinstance(value, int | float):
            continue
        changed = not value if isinstance(value, bool) else value / 2 if value else 1.0
        other = runs.run(generators=True, knobs=((name, type(value)(changed)),))[0]
        parts = [part for part in own.state if part.startswith(("weights/", "kept/"))]
        parts = [part for part in parts if not is_own_number(part, own.state)]  # may be the option itself
        moved = any(difference(own.state[part], other.state.get(part)) for part in parts)
        moved |= own.reported != other.reported
        text = "" if moved else f"{type(value)(changed)} in place of {value} leaves every weight and result as it was"
        yield Verdict(f"effect of {name}", "pass" if moved else "note", text, f"{len(parts)} tensors and numbers")
