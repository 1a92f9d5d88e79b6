"""The times at which stages work, in modes that have some: recorded on request, written as a Chrome trace.

`PYTHONPATH=notebooks python -m lit_cifar fit --trainer.callbacks+=analysis.timeline.Timeline` adds the callback to a
run.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from typing_extensions import override

from lit_cifar.errors import ConfigError
from lit_cifar.mode import NoRecorder, WorkKind, mode_of

FILE = "timeline.json"
_LETTERS: dict[WorkKind, str] = {"forward": "F", "backward": "B"}
# A stage at work on a microbatch, as an event of a Chrome trace. "args" has kind, step (the training batch), stage,
# microbatch, rank, worker (the process or device that works), and saved_bytes: what a forward keeps for backward,
# without parameters and buffers. The microseconds "ts" are of the machine's monotonic clock, which its processes share.
Span: TypeAlias = dict[str, Any]


class _Clock:
    """Times at which a device reaches marks in its queue: now on the CPU, asked for later on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._origin, self._origin_ns = self.mark(), monotonic_ns()

    def mark(self) -> Any:
        if self._device.type != "cuda":
            return monotonic_ns()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def us(self, mark: Any) -> float:
        """Microseconds of the monotonic clock; waits for the device."""
        if self._device.type != "cuda":
            return float(mark / 1e3)
        mark.synchronize()
        return float(self._origin_ns / 1e3 + 1e3 * self._origin.elapsed_time(mark))


@dataclass
class _Work:
    """A span whose marks are not read yet; one without an end still lasts."""

    span: Span
    clock: _Clock
    start: Any = None
    end: Any = None


class StageRecorder(NoRecorder):
    """Records the work that stages report, in the training batch `step`; it does nothing while that is None."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._weights: set[int] = set()
        self._clocks: dict[torch.device, _Clock] = {}
        self._works: list[_Work] = []

    def begin(self, step: int, network: nn.Module) -> None:
        """Record from here on. Tensors of `network` itself do not count as saved for backward."""
        self.step = step
        tensors = [*network.parameters(), *network.buffers()]
        self._weights = {tensor.data_ptr() for tensor in tensors}

    @contextmanager
    @override
    def span(self, kind: WorkKind, **what: Any) -> Iterator[None]:
        if self.step is None:
            yield
            return
        work = self._new(kind, **what)
        work.start = work.clock.mark()
        with self._counting(work.span["args"]) if kind == "forward" else nullcontext():
            yield
        work.end = work.clock.mark()

    @override
    def follow_backward(self, output: Tensor, given: Tensor, **what: Any) -> None:
        if self.step is None or output.grad_fn is None:
            return
        work = self._new("backward", **what)

        def start(_: Tensor) -> None:
            work.start = work.clock.mark()

        def end(*_: Any) -> None:
            work.end = work.clock.mark()

        output.register_hook(start)  # type: ignore[no-untyped-call]
        # The last of the nodes to run ends it. The first stage is given images, which no gradient reaches.
        for node in _nodes_between(output.grad_fn, given.grad_fn):
            node.register_hook(end)

    def _new(self, kind: WorkKind, *, stage: int, microbatch: int, worker: str, device: torch.device) -> _Work:
        if device not in self._clocks:
            self._clocks[device] = _Clock(device)
        rank = dist.get_rank() if dist.is_initialized() else 0
        args: dict[str, Any] = {"kind": kind, "step": self.step, "stage": stage, "microbatch": microbatch}
        args |= {"rank": rank, "worker": worker, "saved_bytes": 0}
        name = f"{_LETTERS[kind]}{microbatch}"
        span = {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": stage, "args": args}
        self._works.append(_Work(span, self._clocks[device]))
        return self._works[-1]

    @contextmanager
    def _counting(self, args: dict[str, Any]) -> Iterator[None]:
        """Count what autograd keeps, each tensor once; a microbatch is a view of its batch."""
        seen = set(self._weights)

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                args["saved_bytes"] += tensor.nbytes
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def spans(self) -> list[Span]:
        """The recorded spans; waits for the devices."""
        return [
            work.span | {"ts": (start := work.clock.us(work.start)), "dur": work.clock.us(work.end) - start}
            for work in self._works
            if work.end is not None
        ]


def _nodes_between(output: Node, given: Node | None) -> set[Node]:
    """The nodes of the graph from `output` to before `given`, without those of parameters, which steps share."""
    found: set[Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node not in found and node is not given and not hasattr(node, "variable"):
            found.add(node)
            waiting.extend(successor for successor, _ in node.next_functions if successor is not None)
    return found


class Timeline(Callback):
    """Writes `timeline.json` into the run folder: the times at which each stage worked on each microbatch.

    The file is a Chrome trace: chrome://tracing and https://ui.perfetto.dev open it.
    `analysis.stage_timeline.read_timeline` reads it.

    Args:
        first_step: The first training batch to record, counted from 0; the ones before it warm up.
        num_steps: Number of training batches to record.
    """

    def __init__(self, *, first_step: int = 3, num_steps: int = 3) -> None:
        self.first_step = first_step
        self.num_steps = num_steps
        self._recorder = StageRecorder()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the stages, which are made later, report to this callback; raise a `ConfigError` if the mode has none."""
        mode = mode_of(trainer.strategy)
        if mode.recorder is None:
            raise ConfigError(
                "the callback Timeline records stages, and this mode has none",
                remedy="use --trainer.strategy=mp, ddp_mp, pp or ddp_pp, or leave the callback out",
            )
        mode.recorder = self._recorder
        self._num_batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.first_step <= self._num_batches < self.first_step + self.num_steps:
            self._recorder.begin(self._num_batches, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._recorder.step = None
        self._num_batches += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        spans = self._recorder.spans()
        gathered: list[Any] = [spans]
        if dist.is_initialized():
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, spans)
        log_dir = trainer.log_dir  # every process must ask for it, which sends a message
        if trainer.is_global_zero and log_dir is not None:
            write_trace([span for part in gathered for span in part], Path(log_dir) / FILE)


def write_trace(spans: list[Span], path: Path) -> None:
    """Write spans as a Chrome trace (the format of "Trace Event Format", Google): processes, and stages as threads."""
    origin = min((span["ts"] for span in spans), default=0)
    stages = sorted({(span["pid"], span["tid"], span["args"]["worker"]) for span in spans})
    names = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": stage, "args": {"name": f"stage {stage}, {worker}"}}
        for rank, stage, worker in stages
    ]
    events = [{**span, "ts": span["ts"] - origin} for span in sorted(spans, key=lambda span: span["ts"])]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": names + events}), encoding="utf-8")
