"""Options that may not change what is trained: how often it is validated, the scale of the loss, others of a script."""

import shlex
from collections.abc import Iterator

from lit_cifar.checks.relations.evaluation import CUT, Evaluations
from lit_cifar.checks.relations.remarks import FOLLOWS_EVALUATION
from lit_cifar.checks.relations.runs import TRAINED, NotJudgedError, Runs, unused
from lit_cifar.checks.verdict import Verdict

_SCALE = 2.0**-6


def validated_more_often(runs: Runs) -> Iterator[Verdict]:
    """Validate and log more often."""
    name = "validating more often"
    runs = runs.planned(seeded_by_step=True)
    own = runs.own()
    if not own.script.is_lightning:
        if (value := own.script.calls.get("validate_every")) is None:
            paste = 'every = relations.knob("validate_every", every)  # steps or epochs between evaluations'
            raise NotJudgedError("nothing says how often it evaluates", paste)
        often = (("validate_every", int(value) // 2 if int(value) > 1 else 2),)
        yield runs.judge(name, own, runs.own(knobs=often), kinds=TRAINED)
        return
    if not own.logged or FOLLOWS_EVALUATION in own.remarks:
        raise NotJudgedError(FOLLOWS_EVALUATION if own.logged else "no validation")
    trainer = (("val_check_interval", 0.5), ("check_val_every_n_epoch", 1), ("log_every_n_steps", 1))
    verdict = runs.judge(name, own, runs.own(trainer=trainer), kinds=TRAINED)
    if verdict.outcome == "fail":
        own_places = runs.judge(name, own, runs.own(trainer=(("limit_val_batches", 0),)), kinds=TRAINED)
        verdict = unused(verdict, "" if own_places.outcome == "fail" else "where the script validates, nothing changes")
    yield verdict


def with_smaller_scale(runs: Runs) -> Iterator[Verdict]:
    """Begin with a smaller scale of the loss: a power of two, which rounds nothing."""
    runs = runs.planned(seeded_by_step=True)
    own = runs.own()
    why = ""
    amp = own.script.by_flag.get("amp")
    if "loss_scale" not in own.script.calls and amp and not amp.value:
        runs = runs.planned(knobs=(("amp", True),))
        own = runs.own()
        why = f"the script is started without {amp.words[-1]}"
    if value := own.script.calls.get("loss_scale"):
        other = runs.own(knobs=(*runs.plan.knobs, ("loss_scale", value * _SCALE)))
        yield unused(runs.judge("scale of the loss", own, other, kinds=TRAINED), why)


def with_further_arguments(runs: Runs, words: str) -> Iterator[Verdict]:
    """These arguments of the script change nothing that it trains or reports."""
    own, other = runs.own(), runs.own(arguments=tuple(shlex.split(words)))
    verdict = runs.judge(f"same with {words}", own, other)
    if verdict.outcome == "fail" and any(trace.part(Evaluations).cut for trace in (own, other)):
        verdict = Verdict(verdict.relation, "abstain", CUT)
    yield verdict
