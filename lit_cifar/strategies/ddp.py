"""`ddp` and `ddp_spawn`: Lightning's, with gradients that the CPUs of one machine average in memory they share."""

from lightning import LightningModule
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lit_cifar.strategies.network import check_gradient_hooks
from lit_cifar.strategies.shared_memory import SharedAverage

# On the CPU communication needs the cores that compute, so nothing is won by starting it before backward has ended: one
# bucket for all gradients. That they are views of it saves a copy.
_SETTINGS = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1 << 20}


class AveragingDDPStrategy(DDPStrategy):
    """DistributedDataParallel; on one machine's CPU its gradients go through `SharedAverage` in place of gloo.

    The arguments are those of Lightning's `DDPStrategy`. With two processes the results are the same bits, with more
    the same up to rounding.
    """

    @property
    def strategy_name(self) -> str:
        """The registered name."""
        return "ddp" if self._start_method == "popen" else f"ddp_{self._start_method}"

    @property
    def shares_memory(self) -> bool:
        """Whether there are several processes, all on one machine's CPU; known once they have met.

        A communication hook of the user's stays.
        """
        on_cpu = self.root_device.type == "cpu" and dist.get_backend() == "gloo" and self._ddp_comm_hook is None
        return on_cpu and self.num_nodes == 1 < self.world_size

    @override
    def connect(self, model: LightningModule) -> None:
        """Accept any module, but to spawned processes none whose hooks on gradients torch does not send."""
        super().connect(model)
        if self._start_method in ("spawn", "forkserver"):
            check_gradient_hooks(model, strategy=self.strategy_name)

    @override
    def configure_ddp(self) -> None:
        if self.shares_memory:
            for name, value in _SETTINGS.items():
                self._ddp_kwargs.setdefault(name, value)
        super().configure_ddp()

    @override
    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        if self.shares_memory:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.register_comm_hook(SharedAverage(self.model.process_group), SharedAverage.__call__)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Take the place of Lightning's own under the short names."""
        for name, start_method in {"ddp": "popen", "ddp_spawn": "spawn"}.items():
            strategy_registry.register(
                name,
                cls,
                description="DistributedDataParallel over processes",
                override=True,
                start_method=start_method,
            )
