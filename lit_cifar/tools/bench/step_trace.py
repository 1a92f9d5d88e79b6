"""What one training step does and holds in memory: recorded in every process by torch's profiler, and written.

The first steps warm up. One is timed as it is, one counts memory, one lets the profiler warm up, and the next is
recorded. Each is a step of its own, as counting and profiling take time.
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic_ns, perf_counter, time_ns
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import profile, record_function

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.mesh import local_part
from lit_cifar.tools.bench.memory import optimizer_bytes, trained_bytes
from lit_cifar.tools.bench.step_events import STAGE, STEP
from lit_cifar.tools.bench.timeline import Recorder, observe_stages

_PLAIN, _COUNTED, _PROFILED, _RECORDED, NUM_STEPS = range(2, 7)  # optimizer steps before each of them begins


class StepTrace(Callback):
    """Writes `rank0.json` and so on into a folder: the arguments of a `RankStep`, with events by the time of day.

    A step lasts from the end of the one before it, so it includes fetching its batch.

    Args:
        folder: It exists.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._steps = 0
        self._start = 0.0
        self._trained = (0, 0)
        self._found: dict[str, Any] = {}
        self._recorder = Recorder()  # of stages, in modes that have some

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        observe_stages(trainer, self._recorder)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse an epoch that ends before the last step."""
        needed, there = NUM_STEPS * trainer.accumulate_grad_batches, trainer.num_training_batches
        if there < needed:
            raise ConfigError(
                f"a trace needs {needed} batches in an epoch, and there are {there}",
                remedy="pass a larger --data.num_train or a smaller --data.batch_size",
            )
        self._saved = SavedForBackward(pl_module)
        self._profile = profile()
        self._step: AbstractContextManager[Any] = record_function(STEP)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count parameters and gradients, while both are there."""
        if self._steps == _COUNTED:
            self._trained = trained_bytes(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin and end what each step is for."""
        if trainer.global_step == self._steps:  # gradients are being accumulated
            return
        self._steps = trainer.global_step
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        if self._steps == _PLAIN:
            self._start = perf_counter()
        elif self._steps == _COUNTED:
            self._found["plain_ms"] = 1000 * (perf_counter() - self._start)
            self._saved.begin()
        elif self._steps == _PROFILED:
            self._saved.end()
            self._found["memory_bytes"] = self._held(trainer)
            self._profile.start()
        elif self._steps == _RECORDED:
            self._recorder.begin(self._steps, pl_module)
            self._step.__enter__()
        elif self._steps == NUM_STEPS:
            self._step.__exit__(None, None, None)
            self._profile.stop()
            self._write(trainer)

    def _held(self, trainer: Trainer) -> dict[str, int]:
        """Bytes in this process, by what they are."""
        parameters, gradients = self._trained
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer state": optimizer_bytes(trainer.optimizers),
            "activations": self._saved.peak,
            "buckets": _bucket_bytes(trainer.strategy.model),
        }

    def _write(self, trainer: Trainer) -> None:
        file = self.folder / f"rank{trainer.global_rank}.json"
        self._profile.export_chrome_trace(str(file))
        profiled = json.loads(file.read_text())
        base_us = profiled.get("baseTimeNanoseconds", 0) / 1e3
        found = (event for event in profiled["traceEvents"] if event["ph"] == "X" and event.get("cat") != "Trace")
        ahead_us = (time_ns() - monotonic_ns()) / 1e3  # of the recorder's clock
        stages = [
            span | {"cat": STAGE, "tid": f"stage {span['tid']}", "ts": span["ts"] + ahead_us}
            for span in self._recorder.spans()
        ]
        events = [*(event | {"ts": base_us + event["ts"]} for event in found), *stages]
        file.write_text(json.dumps({"rank": trainer.global_rank, "events": events} | self._found))


def _bucket_bytes(model: Any) -> int:
    """What DDP holds beside the gradients, as it says itself."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    said: Any = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]
    return sum(int(size) for size in str(sizes).split(","))


class SavedForBackward:
    """Counts bytes that are kept for backward, from `begin` to `end`. Parameters and buffers do not count.

    Tensors that share a storage count once, and a storage counts until backward has used the last of them.

    Attributes:
        peak: The most bytes that were kept at any time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.peak = 0
        self._module = module
        self._kept: WeakSet[_Kept] = WeakSet()
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    @torch.no_grad()
    def begin(self) -> None:
        """Count from here on, in this thread."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        self._lasting = {_address(local_part(tensor)) for tensor in tensors}
        self._hooks.__enter__()

    def end(self) -> None:
        """Stop counting."""
        self._hooks.__exit__()

    @property
    def now(self) -> int:
        """Bytes that are kept at this moment."""
        return sum({kept.address: kept.num_bytes for kept in self._kept}.values())

    def _pack(self, tensor: Tensor) -> "_Kept":
        kept = _Kept(tensor)
        if kept.address not in self._lasting and kept.address not in self._gathered():
            self._kept.add(kept)
            self.peak = max(self.peak, self.now)
        return kept

    def _gathered(self) -> set[int]:
        """Where the parameters are that FSDP2 has gathered, for as long as it keeps them."""
        return {_address(parameter) for parameter in self._module.parameters() if not hasattr(parameter, "to_local")}


class _Kept:
    """A saved tensor, which lives until autograd no longer needs it."""

    def __init__(self, tensor: Tensor) -> None:
        own = local_part(tensor.detach())
        self.tensor = tensor
        self.address = _address(own)
        self.num_bytes = own.untyped_storage().nbytes()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
