"""The contract of a mode: what other parts may ask of a Lightning strategy, and the only place that answers.

The strategies of `lit_cifar.strategies` derive from `Mode`. `mode_of` puts an adapter around any other.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# What takes the network's place: logits (n, C) from images (n, ...).
ForwardFn = Callable[[Tensor], Tensor]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
WorkKind = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a mode's axes and this process's place on them: plain arithmetic, without a process group.

    A *replica* is one copy of the network that sees its own part of every global batch. Under `ddp` each process holds
    one; under `dp` one process holds several; under `pp` several processes hold one together.

    Attributes:
        data_parallel_size: Parts into which processes divide a batch: 1 under `dp`, whose one process reads all.
        data_parallel_rank: This process's part, from 0: the same for processes that hold one replica together.
        model_parallel_size: Number of processes that hold one replica together. They are neighbours.
        local_replicas: Replicas among which one process divides its part once more: several under `dp` only.
        num_microbatches: Number of pieces in which a replica's layers see its part, one after the other.
    """

    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    model_parallel_size: int = 1
    local_replicas: int = 1
    num_microbatches: int = 1

    @property
    def num_replicas(self) -> int:
        """Number of replicas over all processes, by which a global batch must be divisible."""
        return self.data_parallel_size * self.local_replicas


class NoRecorder:
    """Receives what stages report of their work, and keeps nothing; `notebooks/analysis/timeline.py` has another."""

    def span(self, kind: WorkKind, **what: Any) -> AbstractContextManager[None]:
        """Enclose some work; `what` are stage, microbatch, worker and device."""
        return nullcontext()

    def follow_backward(self, output: Tensor, given: Tensor, **what: Any) -> None:
        """Note that autograd will work from `output` of a stage back to what it was `given`."""


class Mode:
    """What a mode divides, and what its processes hold and compute.

    The defaults are those of `ddp` or one device. Some answers are known only once processes have met; they say so.
    """

    is_own = True  # whether it is one of this package, whose page says what it does
    is_single_process = False  # whether it is one process on one machine by itself
    recorder: NoRecorder | None = None  # receives what stages report of their work; None where there are no stages

    @property
    def strategy(self) -> Any:
        return self

    @property
    def name(self) -> str:
        """The value of `--trainer.strategy`, where it has one; else the class's name."""
        return str(getattr(self.strategy, "strategy_name", type(self.strategy).__name__))

    @property
    def is_known(self) -> bool:
        """Whether it is known what each process holds and computes. Asked once the model is set up."""
        return True

    @property
    def start_method(self) -> StartMethod:
        """How it starts its processes: "popen" if they run the user's command again, or others have started them."""
        return getattr(self.strategy, "_start_method", None) or "popen"

    @property
    def is_spawned(self) -> bool:
        """Whether its processes begin without what is in this one, and are sent module and callbacks."""
        return self.start_method in ("spawn", "forkserver")

    @property
    def num_local_processes(self) -> int:
        """Number of processes on this machine. Known once the Trainer is made."""
        return int(getattr(self.strategy, "num_processes", 1))

    @property
    def devices_per_process(self) -> int:
        """Number of devices of each process. Known before the Trainer is made."""
        return 1

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that hold one replica together. Known once the Trainer is made."""
        return 1

    @property
    def local_replicas(self) -> int:
        """Number of replicas in each process. Known once the Trainer is made."""
        return 1

    def replica_of(self, num_samples: int) -> Tensor:
        """Number of the replica in this process that computes each sample of a batch: int64, (num_samples,)."""
        return torch.zeros(num_samples, dtype=torch.int64)

    @property
    def num_microbatches(self) -> int:
        """Number of pieces in which a replica's layers see its part of a batch. Known once the Trainer is made."""
        return 1

    @property
    def layout(self) -> Layout:
        """Known once the Trainer is made; `distributed_sampler_kwargs` is Lightning's own name for who reads what."""
        reads = getattr(self.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return Layout(
            data_parallel_size=reads["num_replicas"],
            data_parallel_rank=reads["rank"],
            model_parallel_size=self.model_parallel_size,
            local_replicas=self.local_replicas,
            num_microbatches=self.num_microbatches,
        )

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The processes that hold the same tensors of different replicas; None for all processes."""
        return None

    @property
    def synchronises_batchnorm(self) -> bool:
        """Whether `--trainer.sync_batchnorm=true` is given."""
        return getattr(self.strategy, "_layer_sync", None) is not None

    @property
    def averages_by_hook(self) -> bool:
        """Whether a communication hook or a model averager may leave replicas unlike. Known once it is set up."""
        hooks = getattr(self.strategy.model, "_comm_hooks", ())
        return bool(hooks or getattr(self.strategy, "_model_averager", None))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise a `ConfigError` for an optimizer that cannot step what a process holds here."""

    def trained_elsewhere(self) -> set[Tensor]:
        """Parameters and buffers that only other processes train. The copies here may be old."""
        return set()

    def split_lines(self) -> list[str]:
        """Lines that say which process holds what of the network. They need no other process, and no `setup`."""
        return []


class _Adapter(Mode):
    """A strategy that this package has not made: Lightning's `ddp`, one device, FSDP2, or anybody's."""

    is_own = False

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        # By name, because those of `lightning.pytorch` and of `pytorch_lightning` are not the same classes.
        self._bases = {kind.__name__ for kind in type(strategy).__mro__}

    @property
    def strategy(self) -> Any:
        return self._strategy

    @property
    def name(self) -> str:
        if type(self._strategy).__name__ == "DDPStrategy":
            return "ddp" if self.start_method == "popen" else f"ddp_{self.start_method}"
        return super().name

    @property
    def is_known(self) -> bool:
        """Whether it is one device, FSDP2, or `ddp` with the module in torch's wrapper and on its root device."""
        if "DDPStrategy" in self._bases:
            model, root = self._strategy.model, self._strategy.root_device
            return isinstance(model, DistributedDataParallel) and all(p.device == root for p in model.parameters())
        return bool(self._bases & {"SingleDeviceStrategy", "ModelParallelStrategy"})


def mode_of(strategy: Any) -> Mode:
    return strategy if isinstance(strategy, Mode) else _Adapter(strategy)
