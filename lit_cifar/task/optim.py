"""The default optimizer, and the learning rate schedule that torch does not have; all others are torch.optim's own."""

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler


class NesterovSGD(SGD):
    """SGD with Nesterov momentum 0.9 and weight decay 5e-4, as for Wide ResNets (Zagoruyko and Komodakis, 2016).

    It is a class because the command line passes explicit settings of the default optimizer on to any other that is
    chosen instead. Here only `lr` is explicit.

    Args:
        params: As of SGD.
        lr: As of SGD.
        fused: As of SGD: all parameters in one kernel.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 0.1, *, fused: bool | None = None
    ) -> None:
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=fused)


class WarmupDecay(LRScheduler):
    """Raises the learning rate linearly to the optimizer's, then decays it to zero at the last step.

    It steps once per batch. `LitResNet` calls `set_total_steps` with the number of optimizer steps of the run.
    Linear warm-up as in Goyal et al., "Accurate, large minibatch SGD", 2017; cosine decay as in Loshchilov and Hutter,
    "SGDR", 2017.

    Args:
        optimizer: Its learning rates are the peak.
        warmup: Share of all steps in which the rate rises, in [0, 1).
        decay: Shape of the decay.
    """

    def __init__(
        self, optimizer: Optimizer, *, warmup: float = 0.1, decay: Literal["cosine", "linear"] = "cosine"
    ) -> None:
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup={warmup} is not a share of all steps: it must be at least 0 and below 1")
        self.warmup = warmup
        self.decay = decay
        self.total_steps: int | None = None
        super().__init__(optimizer)

    def set_total_steps(self, total_steps: int) -> None:
        """Set the number of optimizer steps of the schedule, and the learning rate of the first."""
        self.total_steps = total_steps
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the checkpoint's step, in the schedule of this run, which may have more steps."""
        planned = self.total_steps
        super().load_state_dict(state_dict)
        if planned is not None and planned != self.total_steps:
            rank_zero_warn(
                f"the learning rate schedule of the checkpoint has {self.total_steps} optimizer steps, this run has "
                f"{planned}: from step {self.last_epoch} on the learning rate follows the schedule of this run"
            )
            self.set_total_steps(planned)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each parameter group for the step about to be taken."""
        return [lr * self.factor(self.last_epoch) for lr in self.base_lrs]

    def factor(self, step: int) -> float:
        """The factor of the peak rate at `step`, from 0 to `total_steps - 1`; 1.0 before `set_total_steps`."""
        if self.total_steps is None:
            return 1.0
        rise = round(self.warmup * self.total_steps)
        if step < rise:
            return (step + 1) / (rise + 1)
        fallen = min((step - rise) / max(self.total_steps - rise, 1), 1.0)
        return (1 + math.cos(math.pi * fallen)) / 2 if self.decay == "cosine" else 1 - fallen


def keep_saved_types(optimizer: Optimizer) -> None:
    """Have `load_state_dict` give scalars of the state back the type that they were saved with.

    torch gives all but `step` the type of the parameter. NAdam's `mu_product`, say, is float32 also for parameters in
    float64, and a resumed run would round it in another way.
    """
    saved: list[dict[str, Any]] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: saved.append(state_dict))

    def restore(loaded: Optimizer) -> None:
        state_dict = saved.pop()
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in loaded.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and not value.ndim:
                    loaded.state[parameter][name] = loaded.state[parameter][name].to(value.dtype)

    optimizer.register_load_state_dict_post_hook(restore)
