"""Repeats the steps of every rank on one device, and compares."""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_cifar.checks.repeated_step.digests import Digest, digest
from lit_cifar.checks.repeated_step.events import (
    Backward,
    Call,
    Event,
    Recording,
    Step,
    Tensors,
    UnjudgeableError,
    join,
)
from lit_cifar.checks.repeated_step.exchange import Done, Exchange, problem, received_by, sent_by
from lit_cifar.checks.repeated_step.reduction import ExactMean, gamma
from lit_cifar.checks.repeated_step.tensors import as_real, device_of, fresh_copy, names_of
from lit_cifar.checks.repeated_step.twin import Twin, TwinState, fill, one_process
from lit_cifar.checks.replay.recording import state_digests
from lit_cifar.checks.replay.step_data import Generators, JoinedBatch, judge_batches, judge_draws, judge_draws_between
from lit_cifar.checks.replay.verdict import TAKEN, Finding, Part, Report
from lit_cifar.internals import tree_leaves, tree_map
from lit_cifar.mode.tensors import parameters_of

_RAN_OUT = "ranks have unlike numbers of batches under join()"


class StopReplay(Exception):  # noqa: N818  # it is no error
    """Later steps would start from different values than in the run."""


def judge(
    folder: Path, twin: Twin | None, report: Report, *, device: torch.device, prepare: Callable[["Replayer"], None]
) -> None:
    """Complete the report from the record in the folder; without a twin it already has a reason to abstain.

    Reasons not to judge, and errors of a stranger's code, are put into the report: the training goes on.
    """
    start = perf_counter()
    record = Recording(folder, report.num_ranks, device)
    reasons, hints = record.remarks()
    report.abstained += reasons
    report.notes += hints
    report.mebibytes = record.mebibytes
    if twin is not None and not report.abstained:
        for held in record.starts():
            twin.begin(held)
        replayer = Replayer(record, twin, report)
        prepare(replayer)
        try:
            replayer.run()
        except UnjudgeableError as reason:
            report.abstained.append(str(reason))
        except Exception as error:
            report.error = f"the replay ended by {type(error).__name__}: {error}"
        num_replicas = 1 if twin.hook else report.num_ranks // twin.model_parallel_size
        _abstain_where_it_may_be_chance(report, device, num_replicas=num_replicas)
    report.seconds = perf_counter() - start


def _abstain_where_it_may_be_chance(report: Report, device: torch.device, *, num_replicas: int) -> None:
    """Abstain where a GPU's kernels may add in a new order each time, and where ranks never average gradients."""
    local = [finding for finding in report.findings if finding.part == "local computation"]
    if local and device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        report.abstained.append(f"{local[0]}; this may be a kernel that is not deterministic: pass deterministic=True")
        report.findings = [finding for finding in report.findings if finding not in local]
    if num_replicas > 1 and not report.counts["reduced"] and not report.findings and not report.abstained:
        report.abstained.append("no gradient was averaged over the ranks in these steps")
    if report.num_steps and not report.counts["steps"] and not report.findings and not report.abstained:
        report.abstained.append("no optimizer made a step, as where gradients overflow: replay later ones")


class Replayer:
    """Replays a record on a twin, and writes findings into a report."""

    def __init__(self, record: Recording, twin: Twin, report: Report) -> None:
        self.record, self.twin, self.report = record, twin, report
        self._device = device_of(twin.module)
        self._names = names_of(twin.module, twin.optimizers)
        self._parameters = {name: parameter for parameter, name in self._names.items()}
        self._rank = self._as_rank = 0
        self._events: deque[Event] = deque()
        self._outputs: list[tuple[list[Tensor], list[Tensor | None]]] = []
        self._local: dict[str, list[Digest]] = {}
        self._is_first_pass = True  # whether the segment has had no backward pass yet
        self._kept: set[str] = set()  # gradients that were left from before the segment
        self._has_gradients = False  # whether any gradient is not zero
        self._of_rank_0: list[Backward | Step] = []  # events of the segment whose gradients all ranks share
        self._shared = 0  # number of these that have been reached
        self._means: dict[int, ExactMean] = {}
        self._of_run: Tensors = {}  # gradients of a sharded run after the last reduction,
        self._before: Tensors = {}  # and those of these to which the next one is added
        self._are_parts = False  # whether ranks may hold parts of a model
        self._wrong_locally: set[str] = set()  # parameters for which some rank's own gradient differs
        self._generators: dict[int, list[tuple[Generators, Generators]]] = {}  # as calls begin and end, by rank
        self._epochs: set[int | None] = set()
        self._exchanges: deque[Exchange] = deque()  # exchanges of the call or backward pass that is replayed
        self.joined: JoinedBatch | None = None  # gets each step too, where there is one
        self._holders: dict[str, int] = {}  # by tensor, the place of its rank among those that hold a replica together
        self._hooked: set[str] = set()  # names of parameters that have a hook

    def run(self) -> None:
        """Replay every step, until the values of one are not those of the run."""
        segments = [self.record.segments(rank) for rank in range(self.record.num_ranks)]
        is_uneven = len({len(of_rank) for of_rank in segments}) > 1
        if is_uneven and not self.twin.is_joined:
            steps = ", ".join(str(len(of_rank)) for of_rank in segments)
            self._found("data", "the ranks", f"have made {steps} steps: all that follows is of different steps")
        with one_process(self._exchange, lambda: self._as_rank):
            try:
                for of_ranks in zip(*segments, strict=False):
                    # A rank without a batch waits at the end of its own `join()`.
                    joins = {self.record.load(paths[0]).progress["joins"] for paths in of_ranks if self.twin.is_joined}
                    if len(joins) > 1:
                        raise UnjudgeableError(_RAN_OUT)
                    self._segment(of_ranks)
                if is_uneven and self.twin.is_joined:
                    raise UnjudgeableError(_RAN_OUT)
            except StopReplay:
                self.report.notes.append(f"steps after step {self._step_number} were not judged: nothing equals them")
        if len(self._epochs) == 1:
            judge_draws_between(self.report, self._generators)
        if self.report.counts["gradients"] and not self._has_gradients:
            self.report.note("every gradient is zero in these steps, so the loss trains nothing")

    @property
    def _step_number(self) -> int:
        return self.report.first_step + self.report.num_steps

    def _segment(self, of_ranks: Sequence[Sequence[Path]]) -> None:
        before = TwinState(self.twin)
        self._of_rank_0, self._means, self._wrong_locally = [], {}, set()
        data: dict[int, list[Call]] = {}
        exchanges: dict[int, list[Exchange]] = {}
        wrong = False
        for rank in range(0, len(of_ranks), self.twin.model_parallel_size):
            before.restore()
            self._rank, self._shared = rank, 0
            self._outputs, self._local, self._is_first_pass = [], {}, True
            self._of_run = {n: p.grad for n, p in self._parameters.items() if self.twin.sharded and p.grad is not None}
            events = self._joined(of_ranks[rank : rank + self.twin.model_parallel_size])
            steps = [event for event in events if isinstance(event, Step)]
            if any(len(step.groups) > len(self.twin.optimizers[step.optimizer].param_groups) for step in steps):
                raise UnjudgeableError("an optimizer gets a new group of parameters in these steps: replay others")
            data[rank] = [event for event in events if isinstance(event, Call)]
            exchanges[rank] = [one for event in events if not isinstance(event, Step) for one in event.exchanges]
            if rank == 0:
                self._of_rank_0 = [e for e in events if isinstance(e, Step) or (isinstance(e, Backward) and e.synced)]
            # Without an exchange of data a rank has no reason to compute otherwise than rank 0.
            self._as_rank = rank if exchanges[rank] else 0
            self._events = deque(events)
            while self._events:
                wrong |= self._replay(self._events.popleft())
        self._judge_reductions()
        self._judge_exchanges(exchanges)
        judge_batches(self.report, self._step_number, data)
        drawn = {rank: [call.surroundings for call in calls if call.has_drawn] for rank, calls in data.items()}
        judge_draws(self.report, drawn, self.twin.module)
        for rank, calls in data.items():
            self._generators.setdefault(rank, []).extend((call.surroundings.generators(), call.ended) for call in calls)
        self._epochs |= {call.progress.get("current_epoch") for calls in data.values() for call in calls}
        if self.joined is not None and (text := self.joined.note(data)) and not self.report.findings:
            self.report.note(text)
        self.report.num_steps += 1
        if wrong:
            raise StopReplay

    def _joined(self, of_ranks: Sequence[Sequence[Path]]) -> list[Event]:
        """The events of ranks that hold a replica together, joined to those of the first rank."""
        joined, *others = [[self.record.load(path) for path in paths] for paths in of_ranks]
        first = self._rank
        for place, of_other in enumerate(others, start=1):
            self._rank = first + place
            if [*map(type, of_other)] != [*map(type, joined)]:
                self._found("local computation", "this rank", f"made other passes and steps than rank {first}")
                raise StopReplay
            for event, other in zip(joined, of_other, strict=True):
                if isinstance(event, Call) and isinstance(other, Call):
                    if other.has_drawn and not other.progress.get("callbacks"):
                        raise UnjudgeableError("ranks that hold a replica together each draw their own random numbers")
                    own = {*other.parameters, *other.buffers} - {*event.parameters, *event.buffers}
                    self._holders |= dict.fromkeys(own, place)
                if unlike := join(event, other):
                    self._found("local computation", "this rank", f"has {unlike}, beside rank {first}")
        self._rank = first
        return joined

    def _replay(self, event: Event) -> bool:
        """Replay an event. Return True if later ones cannot be judged."""
        if isinstance(event, Backward):
            self._backward(event)
            return False
        return self._call(event) if isinstance(event, Call) else self._step(event)

    # Local computation

    def _call(self, call: Call) -> bool:
        with torch.no_grad():
            for name, value in call.changed.items():
                self._parameters[name].copy_(value)
        if call.changed:
            names = ", ".join([*call.changed][:2]) + (" ..." if len(call.changed) > 2 else "")
            self.report.note(f"something beside the optimizer changes {names} between steps: {TAKEN}")
        self._are_parts |= self.twin.may_be_part and (call.beside or bool(call.exchanges))
        for name, expected in call.parameters.items():
            mine = digest(self._parameters[name]) if name in self._parameters else None
            if self._are_parts and self._rank and (mine is None or expected.bits != mine.bits):
                raise UnjudgeableError("ranks hold unlike parameters and send one another data, as parts of a model")
            if self._differs("parameters", name, expected, mine, "before the step"):
                self._events.clear()
                return True
        self._fill(call)
        if self.joined is not None:
            self.joined.begin(self.twin.module)
        outputs, found, has_steps = self._outputs_of(call)
        if [each.bits for each in found] != [each.bits for each in call.outputs] and not has_steps:
            self._fill(call)
            outputs, again, _ = self._outputs_of(call)
            if again != found:
                raise UnjudgeableError(
                    "two replays of a step differ, as by a kernel that is not deterministic (pass deterministic=True), "
                    "or by the time"
                )
            self._abstain_where_attributes_are_unknown(call)
            if not self._rank:  # in its own process nothing else can explain it
                raise UnjudgeableError(
                    "rank 0 does not get its own result again, so a step depends on what is not written down, as a "
                    "global value, or a layer that takes the place of another one"
                )
        self.report.counts["outputs"] += len(call.outputs)
        if len(found) != len(call.outputs):
            self._found("local computation", "the outputs", f"are {len(call.outputs)}, in the replay {len(found)}")
        for place, (expected, mine) in enumerate(zip(call.outputs, found, strict=False)):
            name = "the loss" if len(call.outputs) == 1 else f"output {place}"
            self._differs("local computation", name, expected, mine)
        buffers = dict(self.twin.module.named_buffers())
        for name, expected in call.buffers_after.items():
            self.report.counts["buffers"] += 1
            self._differs("local computation", name, expected, digest(buffers[name]), "(buffer)")
        self._outputs.append((outputs, call.output_grads))
        return False

    def _abstain_where_attributes_are_unknown(self, call: Call) -> None:
        if call.attributes.unknown:
            names = ", ".join(call.attributes.unknown[:3])
            raise UnjudgeableError(f"{names} of the module cannot be written down, and may have changed")

    def _fill(self, call: Call) -> None:
        """Set buffers, attributes and counters as they were."""
        fill(self.twin.module, buffers=call.buffers, attributes=call.attributes, but=self.twin.own)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                parameter.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
        self.twin.progress(call.progress | {"global_rank": self._as_rank})

    def _outputs_of(self, call: Call) -> tuple[list[Tensor], list[Digest], bool]:
        """Tensors that the call returns, their digests, and whether it made optimizer steps of its own."""
        waiting = len(self._events)
        args, kwargs = tree_map(fresh_copy, call.inputs)
        self._exchanges = deque(call.exchanges)
        try:
            with call.surroundings.entered(self._device):
                outputs = [leaf for leaf in tree_leaves(self.twin.call(*args, **kwargs)) if isinstance(leaf, Tensor)]
        except (StopReplay, UnjudgeableError):
            raise
        except Exception:  # a stranger's code may raise anything
            self._abstain_where_attributes_are_unknown(call)
            raise
        return outputs, [digest(leaf) for leaf in outputs], len(self._events) < waiting

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        self._local.setdefault(name, []).append(digest(gradient))

    def _backward(self, event: Backward) -> None:
        """Replay a backward pass from the gradients of the outputs, at which the run's own pass began."""
        self._note_zeroing(event)
        if self.twin.sharded:
            # The run averages the gradients of this pass alone, and adds the mean to what it had.
            self._before = {name: value for name, value in self._of_run.items() if name not in event.fresh}
            for name in self._of_run:
                self._parameters[name].grad = None
            self._of_run = {}
        else:
            for name in self._parameters.keys() - event.grads.keys() | {*event.fresh}:  # zeroed in the run
                self._parameters[name].grad = None
        pairs = [
            (leaf, gradient)
            for leaves, gradients in self._outputs
            for leaf, gradient in zip(leaves, gradients, strict=False)
            if gradient is not None and leaf.requires_grad
        ]
        self._outputs = []
        self._exchanges = deque(event.exchanges)
        self._judge_beginning([gradient for _, gradient in pairs])
        if pairs:
            with event.surroundings.entered(self._device) if event.surroundings else nullcontext():
                torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
        self._after_backward(event)

    def _judge_beginning(self, gradients: Sequence[Tensor]) -> None:
        """Judge the factor by which the trainer multiplies the loss before backward, within three roundings."""
        expected = None if self.twin.loss_gradient is None else self.twin.loss_gradient()
        for gradient in gradients:
            if expected and not abs(float(gradient.sum()) / expected - 1) <= gamma(3, gradient.dtype):
                text = f"enters the backward pass multiplied by {float(gradient.sum()):.9g}, not by {expected:.9g}"
                self._found("local computation", "the loss", text)

    def backward_inside(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Stand in for `manual_backward`."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._after_backward(self._expected(Backward))

    def _after_backward(self, event: Backward) -> None:
        # For sharded parameters the run shows no gradients of single ranks: only their mean is judged.
        for name in dict.fromkeys([] if self.twin.sharded else [*event.local, *self._local]):
            of_run, mine = event.local.get(name, []), self._local.get(name, [])
            self.report.counts["gradients"] += 1
            self._has_gradients |= any(each.norm for each in of_run)
            if len(of_run) != len(mine):
                self._wrong_locally.add(name)
                self._found("local computation", name, "got a gradient in the run or in the replay, not in both")
            elif unlike := [pair for pair in zip(of_run, mine, strict=True) if pair[0].bits != pair[1].bits]:
                self._wrong_locally.add(name)
                self._differs("local computation", name, *unlike[0], "(gradient)")
        self._local = {}
        if event.synced:
            self._reduced(event)
        else:
            for name, expected in event.grads.items():
                gradient = self._parameters[name].grad
                assert gradient is not None
                self._differs("local computation", name, expected, digest(gradient), "(accumulated gradient)")
        self.twin.after_backward()

    def _note_zeroing(self, event: Backward) -> None:
        """Note gradients that did not add up between two steps, and those that add up beyond a step."""
        first, self._is_first_pass = self._is_first_pass, False
        grads = self._of_run if self.twin.sharded else {name: p.grad for name, p in self._parameters.items()}
        left = {name for name, grad in grads.items() if grad is not None and grad.any() and grad.isfinite().all()}
        if first:
            self._kept = left - {*event.fresh}
        elif lost := sorted(left & {*event.fresh}):
            known = self.twin.loss_gradient is not None  # the trainer then decides when gradients begin anew
            what = "between accumulated batches" if known else "before a step has used it"
            self.report.note(f"the gradient of {lost[0]} is zeroed {what}" + (f": {TAKEN}" if known else ""))

    # Exchange

    def _exchange(self, name: str, real: Any, group: Any, *args: Any, **kwargs: Any) -> Done:
        """Stand in for a collective: compare what this rank sends, and let it receive the same as in the run."""
        if not self._exchanges or self._exchanges[0].name != name:
            raise UnjudgeableError(f"ranks exchange data by {name} in the replay, where the run did not")
        exchange = self._exchanges.popleft()
        tensors = sent_by(name, args)
        if [tensor.shape for tensor in exchange.sent] != [tensor.shape for tensor in tensors]:
            raise UnjudgeableError(f"ranks exchange other sizes by {name} in the replay than in the run")
        for sent, mine in zip(exchange.sent, tensors, strict=True):
            self._differs("local computation", f"what {name} sends", digest(sent), digest(mine))
        with torch.no_grad():
            for mine, received in zip(received_by(name, args), exchange.received, strict=True):
                mine.copy_(received)
        return Done()

    def _judge_exchanges(self, of_ranks: Mapping[int, Sequence[Exchange]]) -> None:
        """Judge the tensors that ranks received, given those that all of them sent."""
        self._rank = -1
        for group in dict.fromkeys(tuple(exchange.group) for exchanges in of_ranks.values() for exchange in exchanges):
            of_group = [[one for one in of_ranks[rank] if tuple(one.group) == group] for rank in group]
            if len({len(one) for one in of_group}) > 1:
                self._found("exchange", f"ranks {group}", f"took part in {[*map(len, of_group)]} collectives")
            for place, same in enumerate(zip(*of_group, strict=False)):
                self.report.counts["exchanges"] += len(same)
                if text := problem(same):
                    self._found("exchange", f"{same[0].name} {place}", text)

    # Reduction

    def _reduced(self, event: Backward) -> None:
        """Add this rank's gradients to the exact mean, and go on with the gradients of the run."""
        place, first = self._next_shared(Backward)
        mine = {name: self._parameters[name].grad for name in event.grads}
        num_replicas = self.record.num_ranks // self.twin.model_parallel_size
        mean = self._means.setdefault(place, ExactMean(num_replicas, self._before))
        mean.add({name: gradient for name, gradient in mine.items() if gradient is not None})
        for name, expected in event.grads.items():
            self._is_not_of_rank_0(name, expected, first.grads.get(name))
            if name in first.values:
                self._parameters[name].grad = first.values[name].clone()
        if self.twin.sharded:
            self._of_run = {name: value.clone() for name, value in first.values.items()}

    def _is_not_of_rank_0(self, name: str, expected: Digest, first: Digest | None) -> bool:
        if first is not None and expected.bits == first.bits:
            return False
        if self.twin.hook:
            raise UnjudgeableError(f"the communication hook {self.twin.hook} leaves unlike gradients on the ranks")
        norm = "none" if first is None else f"one of norm {first.norm:.9g}"
        holder = self._holders.get(name, 0)
        self._found("reduction", name, f"has a gradient of norm {expected.norm:.9g}, on rank {holder} {norm}")
        return True

    def _judge_reductions(self) -> None:
        self._rank = -1
        for place, mean in self._means.items():
            # A gradient that is wrong locally has no known mean.
            values = self._of_rank_0[place].values
            judged = {name: value for name, value in values.items() if name not in self._wrong_locally}
            if self.twin.hook:
                self._note_hook(mean.compared(judged))
                continue
            for name, value in judged.items():
                share = mean.share(name, value)
                self.report.counts["reduced"] += 1
                if share <= 1:
                    self.report.largest_share = max(self.report.largest_share, share)
                    continue
                norm = float((mean.totals[name] / mean.num_ranks).norm()) if name in mean.totals else 0.0
                text = f"is not the mean over ranks: its norm is {float(value.double().norm()):.9g}, the mean's "
                text += f"{norm:.9g}; an element is {share:.3g} times the bound away"
                self._found("reduction", name, text)

    def _note_hook(self, compared: tuple[float, float]) -> None:
        factor, rest = compared
        is_scaled = abs(factor - 1) > max(10 * rest, 1e-3)  # compression changes little beside a wrong divisor
        how = f"as {factor:.3g} times" if is_scaled else f"{100 * rest:.2g} % away from"
        self.report.note(f"gradients leave the communication hook {self.twin.hook} {how} their mean: {TAKEN}")

    # Optimizer

    def step_inside(self, optimizer: Optimizer) -> None:
        """Stand in for a step that `training_step` makes by itself."""
        event = self._expected(Step)
        if self.twin.optimizers[event.optimizer] is not optimizer:
            raise UnjudgeableError("training_step calls its optimizers in another order in the replay")
        if self._step(event):
            raise StopReplay

    def _step(self, event: Step) -> bool:
        _, first = self._next_shared(Step)
        optimizer = self.twin.optimizers[event.optimizer]
        if self.twin.before_step is not None:
            self.twin.before_step(optimizer)
        if self.twin.before_step is None and first.values:
            self.report.note(f"gradients change between backward pass and step, {self._how(first)}: taken as they are")
        if kept := sorted(self._kept & {*event.grads}) if self.report.num_steps else []:
            self.report.note(f"the gradient of {kept[0]} is not zeroed after a step, so it is used again")
        unlike = False
        for name, expected in event.grads.items():
            gradient = self._parameters[name].grad
            if name in first.values and (self.twin.before_step is None or self._is_scaled_alike(gradient, first, name)):
                mine = first.grads[name]
            else:
                mine = digest(torch.zeros(()) if gradient is None else gradient)
            if not self._differs("optimizer", name, expected, mine, "(gradient that the optimizer used)"):
                unlike |= self._is_not_of_rank_0(name, expected, first.grads.get(name))
            if name in first.values:
                self._parameters[name].grad = first.values[name].clone()
        for name in sorted({self._names[parameter] for parameter in parameters_of(optimizer)} - {*event.grads}):
            if self._parameters[name].grad is not None:
                self._parameters[name].grad = None
                if name in first.grads:
                    unlike = True
                    self._found("optimizer", name, "has no gradient when the optimizer steps, on rank 0 it has one")
                else:
                    self.report.note(f"something takes the gradient of {name} away before the step: {TAKEN}")
        if event.groups != first.groups:
            unlike = True
            self._found("optimizer", type(optimizer).__name__, f"has {event.groups}, on rank 0 {first.groups}")
        for group, recorded in zip(optimizer.param_groups, event.groups, strict=True):
            group.update(copy.deepcopy(recorded))
        vars(optimizer).update(event.scaling)
        with event.surroundings.entered(self._device):
            optimizer.step()
        for name in event.scaling:
            delattr(optimizer, name)
        after = state_digests(optimizer, self._names)
        self.report.counts["states"] += len(event.after)
        self.report.counts["steps"] += int(self._rank == 0)
        wrong = [self._differs("optimizer", name, expected, after.get(name)) for name, expected in event.after.items()]
        return unlike or any(wrong)

    def _how(self, step: Step) -> str:
        """Words for the change that a script has made to the gradients of a step, as far as a factor tells."""
        factors = []
        for name in step.grads:
            before = self._parameters[name].grad
            if before is None or not before.any():
                continue
            bound = 8 * torch.finfo(before.dtype).eps
            before, used = (as_real(value).double() for value in (before, step.values.get(name, before)))
            factor = float((before * used).sum() / before.square().sum())
            if not bool(((used - factor * before).abs() <= bound * abs(factor) * before.abs()).all()):
                return "not by a factor"
            factors.append(factor)
        if factors and max(factors) - min(factors) > 1e-3 * abs(max(factors)):
            return "by another factor for each parameter"
        return "by one factor, as by clipping"

    def _is_scaled_alike(self, gradient: Tensor | None, first: Step, name: str) -> bool:
        """Whether a gradient differs from the run's by no more than clipping by the norm of all gradients explains.

        Ranks that share the gradient add the n squares in a different order. A sum of n rounded numbers is rarely more
        than a few sqrt(n) u off: N. Higham and T. Mary, A new approach to probabilistic rounding error analysis, 2019.
        """
        if not (self.twin.sharded or self.twin.model_parallel_size > 1) or gradient is None:
            return False
        number = sum(parameter.numel() for parameter in self._parameters.values())
        bound = 8 * number**0.5 * torch.finfo(gradient.dtype).eps / 2 * gradient.abs()
        return bool(((first.values[name] - gradient).abs() <= bound).all())

    # Helpers

    def _next_shared(self, kind: type[Any]) -> tuple[int, Any]:
        """The next event of rank 0, to which this one belongs: all ranks make the same reductions and steps."""
        place, self._shared = self._shared, self._shared + 1
        event = self._of_rank_0[place] if place < len(self._of_rank_0) else None
        if not isinstance(event, kind):
            self._found("reduction", "this rank", "made another sequence of backward passes and steps than rank 0")
            raise StopReplay
        return place, event

    def _expected(self, kind: type[Any]) -> Any:
        event = self._events.popleft() if self._events else None
        if not isinstance(event, kind):
            raise UnjudgeableError("training_step went another way in the replay than in the run")
        return event

    def _differs(self, part: Part, name: str, expected: Digest, mine: Digest | None, what: str = "") -> bool:
        if mine is not None and expected.bits == mine.bits:
            return False
        self._found(part, name, f"{what} differs: {_norms(expected, mine)}".strip())
        return True

    def _found(self, part: Part, tensor: str, text: str) -> None:
        rank = self._rank + self._holders.get(tensor.partition(":")[0], 0) if self._rank >= 0 else None
        self.report.findings.append(Finding(part, self._step_number, rank, tensor, text))


def _norms(expected: Digest, mine: Digest | None) -> str:
    if mine is None:
        return "the replay has none"
    if not (expected.norm or mine.norm):
        return "it is another value"
    same = "" if f"{expected.norm:.9g}" != f"{mine.norm:.9g}" else ", elements differ"
    return f"its norm is {expected.norm:.9g}, in the replay {mine.norm:.9g}{same}"
