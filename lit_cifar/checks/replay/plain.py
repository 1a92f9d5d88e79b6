"""`replay`: the counterpart of `Replay` for a loop in plain PyTorch."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lit_cifar.checks.repeated_step.events import UnjudgeableError
from lit_cifar.checks.repeated_step.sharded import is_sharded
from lit_cifar.checks.repeated_step.tensors import device_of
from lit_cifar.checks.repeated_step.twin import Twin, communication_hook, twin_of, what_cannot_be_judged
from lit_cifar.checks.replay.epoch import ReadIds, judge_readings
from lit_cifar.checks.replay.recording import Recorder
from lit_cifar.checks.replay.replaying import judge
from lit_cifar.checks.replay.states import are_replicas, compare_replicas
from lit_cifar.checks.replay.verdict import Report


class replay:  # noqa: N801  # reads as a function: `with replay(model, optimizer) as r:`
    """Replays the first steps of a loop in plain PyTorch; `report` holds the result on every rank.

    The loss, which the script computes beside the module, is taken as it is: the replay begins its backward pass at the
    gradients of the module's outputs. Changes of gradients between backward pass and step, such as clipping, are taken
    as they are too. A loss that also depends on parameters directly, such as by a penalty, cannot be judged.

    Args:
        model: A module, or a `DistributedDataParallel` that wraps one.
        optimizers: All optimizers that the loop uses.
        steps: Number of optimizer steps to judge, from the first one inside the `with`.
    """

    report: Report

    def __init__(self, model: nn.Module, *optimizers: Optimizer, steps: int = 4) -> None:
        self.model, self.steps = model, steps
        self.optimizers = [*map(_unwrapped, optimizers)]
        self.module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._is_open = self._syncs = False
        self._join: Any = None  # the `join()` in which the model was called last, and their number
        self._joins = 0
        self._folder: Path | None = None  # None where nothing is recorded
        self._twin: Twin | None = None

    def __enter__(self) -> "replay":
        return self.start()

    def start(self) -> "replay":
        """Begin without a `with`, for a loop that none can enclose; call `finish` after the loop."""
        self._rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        enabled = torch.is_autocast_enabled(device_of(self.module).type)
        precision = "autocast" if enabled else str(next(self.module.parameters()).dtype).removeprefix("torch.")
        self.report = Report(type(self.model).__name__, world_size, precision, 0)
        self.report.abstained += what_cannot_be_judged(self.module, autocast=enabled)
        # A plain module trains on each rank alone, which is a mistake. One that wraps another may do anything.
        if world_size > 1 and self.module is self.model and isinstance(getattr(self.model, "module", None), nn.Module):
            self.report.abstained.append(f"{type(self.model).__name__} is not known here: DistributedDataParallel is")
        if not self.report.abstained:
            self._record()
        return self

    def _record(self) -> None:
        self._folder = Path(_from_rank_0(tempfile.mkdtemp(prefix="replay-") if self._rank == 0 else None))
        if self._rank == 0 or is_sharded(self.module):
            self._make_twin()
        self._recorder = Recorder(
            self._folder,
            rank=self._rank,
            module=self.module,
            optimizers=self.optimizers,
            is_synced=lambda: self._syncs,
            progress=lambda: {"joins": self._joins},
            by_engine=True,
        )
        self._handles = [
            self.module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.module.register_forward_hook(self._after_forward),
        ]
        self._is_open = True
        self._read = ReadIds()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._close()
            self._remove()

    @property
    def done(self) -> bool:
        """Whether all steps have been recorded, so that a loop for the replay alone may end."""
        return not self._is_open or self._recorder.num_steps >= self.steps

    def finish(self) -> Report:
        """Judge the record, and print the report. All ranks must call this."""
        self._close()
        if self._folder is not None:
            self._judge(self._folder)
            if not dist.is_initialized() or are_replicas(self.model):
                judge_readings(self.report, self._read.readings)
        if are_replicas(self.model):
            compare_replicas(self.report, self.module)
            self.report = _from_rank_0(self.report)
        if self._rank == 0:
            print("\n".join(self.report.lines()), flush=True)
        return self.report

    def _remove(self) -> None:
        """Remove the record, and observe loaders no more."""
        if self._folder is not None:
            self._read.close()
            if self._rank == 0:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _make_twin(self) -> None:
        try:
            module, optimizers = twin_of(self.module, self.optimizers)
            is_plain = self.model is self.module and not is_sharded(self.module)
            self._twin = Twin(module, optimizers, module, is_sharded(self.module), may_be_part=is_plain)
        except UnjudgeableError as reason:
            self.report.abstained.append(str(reason))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._recorder.num_steps >= self.steps:
            self._close()
        elif torch.is_grad_enabled() and module.training:
            self._read.trains()
            # DDP decides in the forward pass, whatever `no_sync` surrounds the backward pass.
            if (join := getattr(self.model, "_join_config", None)) is not self._join:
                self._join, self._joins = join, self._joins + 1
            self._syncs = isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync
            self._recorder.begin(args, kwargs)

    def _after_forward(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._is_open and torch.is_grad_enabled() and module.training:
            self._recorder.end(outputs)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._recorder.close()
            for handle in self._handles:
                handle.remove()

    def _judge(self, folder: Path) -> None:
        if dist.is_initialized():
            dist.barrier()
        if self._rank == 0:
            if self._twin is not None and isinstance(self.model, DistributedDataParallel):
                self._twin.hook = communication_hook(self.model)
                self._twin.is_joined = self.model._join_config.enable
            judge(folder, self._twin, self.report, device=device_of(self.module), prepare=lambda replayer: None)
        self._remove()
        self.report = _from_rank_0(self.report)


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that makes the steps: accelerate's holds another one, and has no hooks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _from_rank_0(value: Any) -> Any:
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
