"""What a network of the user's must do with its gradients, before processes are started that would wait for them."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lit_cifar.errors import ConfigError
from lit_cifar.mode import mode_of
from lit_cifar.models.own_network import unreached_parameters
from lit_cifar.strategies.base import check_gradient_hooks
from lit_cifar.strategies.mesh import MeshStrategy
from lit_cifar.task.module import LitResNet


def check_gradients(strategy: Any, module: LitResNet, *, has_parts: bool) -> None:
    """Refuse gradients that `DistributedDataParallel` or virtual replicas, `has_parts`, could not add up."""
    mode, is_ddp = mode_of(strategy), isinstance(strategy, DDPStrategy)
    if is_ddp and mode.is_spawned:  # torch does not send hooks to processes
        check_gradient_hooks(module, strategy=f"ddp_{mode.start_method}")
    finds = not is_ddp or strategy._ddp_kwargs.get("find_unused_parameters") or strategy._ddp_kwargs.get("static_graph")
    if finds and not has_parts:
        return
    start = "" if mode.start_method == "popen" else f"_{mode.start_method}"
    other, kind = f"pass --trainer.strategy=ddp{start}_find_unused_parameters_true", type(module.network).__name__
    never, sometimes = unreached_parameters(module.network, module.image_shape)
    if sometimes and (has_parts or mode.layout.data_parallel_size > 1):
        problem = f"{kind} leaves out {sometimes[0]} in some steps, as it draws: replicas would mix gradients, or wait"
        first = "" if has_parts else f"{other}, or "
        raise ConfigError(problem, remedy=f"{first}multiply by 0 in place of leaving it out")
    if never and not finds and not isinstance(strategy, MeshStrategy):
        problem = f"the loss of {kind} does not depend on {len(never)} of its parameters, such as {never[0]}"
        raise ConfigError(f"{problem}: ddp would wait for their gradients", remedy=f"{other}, or remove them")
