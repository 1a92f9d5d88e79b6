"""What a process sees of the training in it: its batches, steps and calls, and what the script asks and tells."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, sleep
from typing import Any
from unittest import mock
from weakref import WeakSet

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook

from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.batches import sample_digests, tensors_in
from lit_cifar.checks.relations.evaluation import EVALUATE_SLOWLY, Evaluations
from lit_cifar.checks.relations.generators import Draws, seed_all, states, turn_dropout_off
from lit_cifar.checks.relations.interruption import CHECKPOINT, Checkpoints, StopAt
from lit_cifar.checks.relations.own_checkpoints import Writes
from lit_cifar.checks.relations.parts import TrainedParts, outermost
from lit_cifar.checks.relations.patching import after, before, patched
from lit_cifar.checks.relations.plan import GoOn, RunPlan, Trace
from lit_cifar.checks.relations.purposes import Purposes
from lit_cifar.checks.relations.switches import in_double
from lit_cifar.checks.relations.told import At, Told, numbers_in
from lit_cifar.checks.relations.trained import Observed, Observer, owned_by
from lit_cifar.checks.tensors import as_real
from lit_cifar.errors import printable
from lit_cifar.internals import temporarily_clear_interpreter_stack

_LED_S = 20.0  # through epochs without a batch, to an evaluation
_SLOWED, _DELAY_S = 3, 1.1  # evaluations, and the delay of each: more than one of the seconds that a script may print


class Ended(BaseException):
    """The training ends here, as if it were killed; no `except Exception` of the script catches it."""


class Watched:
    """The training of this process, and the answers to its `calls`."""

    def __init__(self, plan: RunPlan, folder: Path, rank: int) -> None:
        self.plan, self.folder, self.rank, self.trace = plan, folder, rank, Trace()
        self.stop, self.go_on = plan.asked(StopAt), plan.asked(GoOn)
        self.steps_before = self.go_on.steps_before if self.go_on else 0  # of the run that this one goes on from
        self.most_steps = plan.limits.steps - self.steps_before
        go_on = (self.go_on.checkpoint, self.go_on.redrawn) if self.go_on else (None, ())
        self.parts, self.draws = TrainedParts(*go_on), Draws(self.trace)
        self._observer = Observer(self.trace, self.parts)
        self._writes = Writes(plan, self.trace, self.parts, self.has_saved)
        self.phase: Callable[[], str] = self._own_phase
        self.evaluation_batch = plan.evaluation_batch
        self.is_evaluating = False  # whether an evaluation reads a loader
        self._depth = 0  # of calls of modules
        self.waiting = deque[list[int]]()  # digests of the samples of batches that are read several before a step
        self._called_now: nn.Module | None = None
        self._has_trained = self._is_saved = self._is_in_batch = self._is_known = False
        self._has_evaluated = False  # since the last step
        self._refreshed = WeakSet[nn.Module]()  # called in train mode without gradients, since the last step
        self._to_slow = _SLOWED if plan.asks == EVALUATE_SLOWLY else 0  # evaluations
        self.calls_of_step, self._passes, self._began = 0, 0, perf_counter()

    def _own_phase(self) -> str:
        """Of a plain loop: it evaluates without gradients, or with a model in eval mode that is else trained.

        A batch may be known to be trained all the same, by a script that forgets the mode behind its first evaluation.
        """
        modules = (*self.parts.roots, *([] if self._called_now is None else [self._called_now]))
        trains = any(getattr(getattr(own, "module", own), "training", own.training) for own in modules)  # of a wrapper
        evaluates = self._has_trained and not self._is_known and not trains
        return "train" if torch.is_grad_enabled() and not evaluates else "evaluate"

    def knob(self, name: str, own: Any) -> Any:
        self.trace.script.calls[name] = own
        return dict(self.plan.knobs).get(name, own)

    def resume(self) -> str | None:
        self.trace.script.calls["resume"] = None
        return self.go_on.checkpoint if self.go_on else None

    def save(self) -> str | None:
        self.trace.script.calls["save"] = None
        self.look_for_step()
        saves = self.trace.part(Checkpoints).saves
        saves.append(self.trace.steps)
        if self._is_saved:
            raise Ended
        if self.stop is None or self.stop.after == "write" or len(saves) != self.stop.number:
            return None
        self.has_saved()
        return str(self.folder.parent / CHECKPOINT)

    def has_saved(self) -> None:
        """Note the state of the training as it should be in the checkpoint."""
        self._is_saved = True
        self.trace.part(Checkpoints).saved = self.parts.snapshot()

    def report(self, values: dict[str, Any]) -> None:
        self.look_for_step()
        if numbers := _numbers_of(values):
            self.trace.logged.append((self.trace.steps, numbers))
            self.trace.part(Told).results |= numbers.keys() if self._has_evaluated else set()
        self.parts.kept |= values

    def hear(self, who: str, values: Mapping[str, Any]) -> None:
        """Note numbers that the script tells another, if it has evaluated since the last step."""
        if self._has_evaluated and not self.is_evaluating and not self.trace.script.is_lightning:
            for name, value in _numbers_of(values).items():
                self.trace.part(Told).heard.setdefault(At(f"{who}: {name}", self.trace.steps), set()).add(value)

    def hear_line(self, text: str) -> None:
        if not (self._has_evaluated or self.is_evaluating):
            return
        told = self.trace.part(Told)
        for name, (value, digit) in numbers_in(text).items():
            key = f"printed: {printable(name)}"
            if self.is_evaluating:
                told.of_batches.add(key)
            told.digits[key] = digit
            self.hear("printed", {name: value})

    def patch(self) -> None:
        self.parts.patch()
        self._writes.patch()
        patched(nn.Module, "__call__", self._called)
        patched(torch.Tensor, "backward", before(self._observer.follow_backward))
        patched(torch.Tensor, "backward", after(self.follow_next))
        for name in ("backward", "grad"):
            patched(torch.autograd, name, before(self._observer.note_backward))
        patched(swa_utils, "update_bn", self._as_it_is)
        register_optimizer_step_post_hook(self._after_step)

    def _as_it_is(self, evaluate: Any, *args: Any, **settings: Any) -> Any:
        """For what reads data without a gradient and is no evaluation: its batches stay as they are."""
        with mock.patch.object(self, "evaluation_batch", None):
            return evaluate(*args, **settings)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.trace.first and all(group.get("lr") == 0 for group in optimizer.param_groups):
            return  # torch makes the states of an optimizer so, before it loads a checkpoint into them
        self._count_step(owned_by([optimizer]))
        self._observer.follow_step(optimizer, self.trace.norms[-1])

    def _count_step(self, parameters: Sequence[torch.Tensor]) -> None:
        self.trace.part(Purposes).note("train")
        self.draws.note()
        self.trace.steps += 1
        self.calls_of_step = 0
        self._has_evaluated = False
        self._refreshed.clear()
        self.parts.late.clear()
        self.draws.follow_step(is_in_batch=self._is_in_batch)
        norms = [as_real(p.detach()).double().norm().cpu() for p in parameters if not p.is_meta]
        self.trace.norms.append(float(torch.stack(norms).norm()) if norms else 0.0)
        self.seed("step")
        if self._writes.lacks_reading:
            raise Ended

    def look_for_step(self) -> None:
        """Count a step if weights were moved by hand."""
        if self._observer.moved_by_hand():
            self.trace.remarks.add(remarks.BY_HAND)
            self._count_step([parameter for parameter in self.parts.made if parameter is not None])

    def begins_batch(self, samples: list[int], *, is_known: bool) -> None:
        """Called after a batch of training was fetched, with digests of its samples, if they can be told apart."""
        if not self.trace.script.is_lightning:
            self.note_samples(samples)
        self._is_in_batch, self._is_known = True, is_known
        self.seed(f"batch {self.calls_of_step}")

    def follow_draws(self, samples: list[int]) -> None:
        """Called before a batch of these samples is trained, and after its data set has drawn."""
        has_model = self.parts.optimizers or any(one is not None for one in self.parts.made)  # else it is made next
        follows = self.plan.quiet and has_model and remarks.UNDIVIDED not in self.trace.remarks
        self.draws.follow_batch(samples if follows else None)

    def follow_next(self, *_: Any) -> None:
        """Called after a backward pass, in some modes of torch twice: of batches read before, the next is trained."""
        done, self._passes = self._passes, self.trace.part(Observed).backwards
        if self.waiting and self._passes > done:
            self.draws.note()
            self.waiting.popleft()
            if self.waiting:
                self.follow_draws(self.waiting[0])

    @property
    def progress(self) -> tuple[int, int, int]:
        """Another one once a batch was trained, by a call of a module or without one."""
        return self.trace.steps, self.calls_of_step, self.trace.part(Observed).backwards

    def fetches_batch(self) -> None:
        """Called before a batch of training is fetched, but for the first of a loader."""
        self.look_for_step()
        self.draws.note()
        self.draws.stop()
        self._is_in_batch = self._is_known = False
        self.seed(f"fetch {self.calls_of_step}")

    def seed(self, what: str) -> None:
        """If generators follow the step, seed them by the steps before, also of the run that this one goes on from."""
        if self.plan.seeded_by_step:
            seed_all(what, self.trace.steps + self.steps_before)

    def _called(self, call: Any, module: nn.Module, /, *args: Any, **settings: Any) -> Any:
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        is_outermost = self._depth == 0 and not is_traced  # a trace would follow what we compute too
        has_weights = is_outermost and next(module.parameters(), None) is not None
        if has_weights:
            with temporarily_clear_interpreter_stack():  # of `vmap` and others, where tensors show no values
                self._before_call(module, (args, settings))
            if self.plan.double:
                args, settings = in_double(args), in_double(settings)
        before = states() if is_outermost and self.phase() == "evaluate" else None
        self._depth += 1
        try:
            return call(module, *args, **settings)
        finally:
            self._depth -= 1
            if is_outermost and self.phase() == "train":
                self.draws.note()
            elif has_weights:
                self.draws.go_on()
                is_evaluated = self.is_evaluating or not self._is_in_batch  # else perhaps a teacher in a step
                self.trace.remarks |= {remarks.IN_MODEL} if is_evaluated and before != states() else set()

    def _before_call(self, module: nn.Module, inputs: Any) -> None:
        self._called_now = module
        if self.plan.quiet:  # roots too: Lightning's are known before
            turn_dropout_off(module)
        phase = self.phase()
        self.trace.part(Purposes).note(phase)
        if phase != "train":
            if self._to_slow and not self._has_evaluated:
                self._to_slow -= 1
                sleep(_DELAY_S)
            self._has_evaluated = True
            self.trace.part(Evaluations).calls += 1
            self.draws.pause()
            if module.training:
                self._refreshed.add(module)
            elif module in self._refreshed:
                self.trace.remarks.add(remarks.REFRESHED)
            self.parts.keep_beside(module)
            return
        self._has_trained |= module.training
        self.calls_of_step += 1  # not the batches, of which a resumed training may skip some
        is_lightning = self.trace.script.is_lightning
        if not is_lightning:  # where a rank may call other modules than the other, or none
            self.continues()
        if not self.parts.is_root(module):
            self.parts.forget_given_up()
            self.parts.roots.append(module)
        self.begins()
        self.draws.follow_call()
        if not self._is_in_batch and not is_lightning:
            tensors = tensors_in(inputs)
            with suppress(RuntimeError):  # a tensor inside of `vmap` shows no values
                self.note_samples([] if any(tensor.requires_grad for tensor in tensors) else sample_digests(tensors))

    def continues(self) -> None:
        """Called before each batch and call of training: end the training if it is time."""
        self.look_for_step()
        self._writes.close()
        self.trace.seconds = perf_counter() - self._began
        self.trace.end.at_limit = self.trace.steps >= self.most_steps
        if self._is_saved or self.trace.end.at_limit or self.trace.seconds > self.plan.most_s:
            raise Ended

    def is_over(self) -> bool:
        """Called before each batch of training: whether there is none, so that the script comes to its evaluation."""
        if not self.plan.to_evaluation or self.trace.steps < self.most_steps:
            return False
        if self._has_evaluated or perf_counter() - self._began > self.trace.seconds + _LED_S:
            raise Ended
        self.trace.end.at_limit = True
        self.trace.state = self.trace.state or self.parts.snapshot()
        return True

    def begins(self) -> None:
        """Note what the training begins with, the first time."""
        if not self.trace.first:
            self._observer.begins()
            ports = [one.laddr.port for one in psutil.Process().net_connections() if one.status == "LISTEN"]
            self.trace.has_port = any(port < 32_768 for port in ports)  # others Linux gives to who asks for any
            self._began = perf_counter()
        self.parts.to_spoil.clear()  # whatever is loaded from now on is no checkpoint to go on from
        if self.go_on and not self.trace.part(Checkpoints).resumed:
            self.trace.part(Checkpoints).resumed = self.parts.snapshot()

    def note_samples(self, samples: list[int]) -> None:
        """Note the digests of samples of the step that follows."""
        while len(self.trace.samples) <= self.trace.steps:
            self.trace.samples.append([])
        self.trace.samples[self.trace.steps] += samples

    def drawn_apart(self) -> None:
        """Note that a generator of the script's own draws: in an evaluation, other batches give other numbers."""
        if self._is_in_batch:
            self.trace.remarks.add(remarks.IN_STEP)
        if self._has_trained and self.phase() == "evaluate":
            self.trace.remarks.add(remarks.IN_EVALUATION if self.is_evaluating else remarks.BESIDE_EVALUATION)

    def finish(self) -> None:
        """Note what the training has come to."""
        self.look_for_step()
        parts, trace = self.parts, self.trace
        self._writes.close()
        trace.seconds = perf_counter() - self._began
        trace.peak = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
        trace.state = trace.state or parts.snapshot()
        trace.part(Checkpoints).models = len(outermost(parts.roots))
        if any(isinstance(parameter, DTensor) for parameter in owned_by(parts.optimizers)):
            trace.remarks.add(remarks.PARTS)
        self._observer.finish()


def _numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that are one real number: Python's, NumPy's, or a tensor of one, such as a metric computes."""
    found = {}
    for name, value in values.items():
        is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() and not value.is_meta
        if is_one or isinstance(value, Real):
            found[printable(str(name))] = float(value)
    return found
