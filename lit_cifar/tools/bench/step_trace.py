"""What one training step does and holds in memory: recorded in every process by torch's profiler, and written.

The first steps warm up. One is timed as it is, one counts memory, one lets the profiler warm up, and the next is
recorded. Each is a step of its own, as counting and profiling take time.
"""

import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns, perf_counter, time_ns
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import profile, record_function

from lit_cifar.errors import ConfigError
from lit_cifar.reporting.memory import optimizer_bytes, trained_bytes
from lit_cifar.reporting.timeline import LETTERS, Recorder, Span
from lit_cifar.strategies.mesh import local_part

STEP = "one training step"  # what the recorded one is called among the profiler's events
_PLAIN, _COUNTED, _PROFILED, _RECORDED, NUM_STEPS = range(2, 7)  # optimizer steps before each of them begins


class StepTrace(Callback):
    """Writes `profile0.json` and so on into a folder, what the profiler saw of a step, and `facts0.json`, all else.

    A step lasts from the end of the one before it, so it includes fetching its batch.

    Args:
        folder: It exists.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._steps = 0
        self._start = 0.0
        self._facts: dict[str, Any] = {}
        self._trained = (0, 0)
        self._saved: SavedForBackward | None = None
        self._profile: Any = None
        self._step: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse an epoch that ends before the last step."""
        needed, there = NUM_STEPS * trainer.accumulate_grad_batches, trainer.num_training_batches
        if there < needed:
            raise ConfigError(
                f"a trace needs {needed} batches in an epoch, and there are {there}",
                remedy="pass a larger --data.num_train or a smaller --data.batch_size",
            )

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
        match self._steps:
            case n if n == _PLAIN:
                self._start = perf_counter()
            case n if n == _COUNTED:
                self._facts["plain_ms"] = 1000 * (perf_counter() - self._start)
                self._saved = SavedForBackward(pl_module)
                self._saved.begin()
            case n if n == _PROFILED:
                self._facts["memory_bytes"] = self._held(trainer)
                self._profile = profile()
                self._profile.start()
            case n if n == _RECORDED:
                self._begin(trainer, pl_module)
            case n if n == NUM_STEPS:
                self._end(trainer)

    def _held(self, trainer: Trainer) -> dict[str, int]:
        """Bytes in this process, by what they are."""
        assert self._saved is not None
        self._saved.end()
        parameters, gradients = self._trained
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer state": optimizer_bytes(trainer.optimizers),
            "activations": self._saved.peak,
            "buckets": _bucket_bytes(trainer.strategy.model),
        }

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        recorder: Recorder | None = getattr(trainer.strategy, "recorder", None)
        if recorder is not None:
            recorder.begin(self._steps, pl_module)
        self._step = record_function(STEP)
        self._step.__enter__()

    def _end(self, trainer: Trainer) -> None:
        self._step.__exit__(None, None, None)
        self._profile.stop()
        rank = trainer.global_rank
        recorder: Recorder | None = getattr(trainer.strategy, "recorder", None)
        ahead_ns = time_ns() - monotonic_ns()  # of the profiler's clock, which is the time of day
        spans = [] if recorder is None else recorder.spans()
        self._facts["stages"] = [_event(span, ahead_ns) for span in spans]
        self._profile.export_chrome_trace(str(self.folder / f"profile{rank}.json"))
        (self.folder / f"facts{rank}.json").write_text(json.dumps({"rank": rank} | self._facts))


def _bucket_bytes(model: Any) -> int:
    """What DDP holds beside the gradients, as it says itself."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    said: Any = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]
    return sum(int(size) for size in str(sizes).split(","))


def _event(span: Span, ahead_ns: int) -> dict[str, Any]:
    """A stage's work on a microbatch; times in microseconds."""
    return {
        "name": f"{LETTERS[span.kind]}{span.microbatch}",
        "ts": (span.start_ns + ahead_ns) / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": {"stage": span.stage, "microbatch": span.microbatch, "kind": span.kind},
    }


# What autograd keeps for backward -------------------------------------------------------------------------------------


class SavedForBackward:
    """Counts bytes that are kept for backward, from `begin` to `end`. Parameters and buffers do not count.

    Tensors that share a storage count once, and a storage counts until backward has used the last of them.

    Attributes:
        peak: The most bytes that were kept at any time.
    """

    def __init__(self, module: nn.Module) -> None:
        self.peak = 0
        self._module = module
        self._now = 0
        self._users: dict[int, int] = {}  # saved tensors of each storage
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    @torch.no_grad()
    def begin(self) -> None:
        """Count from here on, in this thread."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        self._lasting = {_address(local_part(tensor)) for tensor in tensors}
        self._hooks.__enter__()

    def end(self) -> None:
        """Stop counting."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        own = local_part(tensor.detach())
        address = _address(own)
        if address in self._lasting or address in self._gathered():
            return tensor
        if address not in self._users:
            self._users[address] = 0
            self._now += own.untyped_storage().nbytes()
            self.peak = max(self.peak, self._now)
        self._users[address] += 1
        return _Kept(tensor, lambda: self._release(address, own.untyped_storage().nbytes()))

    def _release(self, address: int, num_bytes: int) -> None:
        self._users[address] -= 1
        if self._users[address] == 0:
            del self._users[address]
            self._now -= num_bytes

    def _gathered(self) -> set[int]:
        """Where the parameters are that FSDP2 has gathered, for as long as it keeps them."""
        return {_address(parameter) for parameter in self._module.parameters() if not hasattr(parameter, "to_local")}


class _Kept:
    """A saved tensor that tells when autograd no longer needs it."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()


def _unpack(kept: Any) -> Tensor:
    tensor: Tensor = kept.tensor if isinstance(kept, _Kept) else kept
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
