"""One network run as several replicas in one process: scatter the batch, run the replicas, gather their outputs.

Both kinds compute the same function. The batch is cut by `Tensor.chunk`; every chunk has its own BatchNorm statistics;
replica 0 works on the network's own buffers, so its running statistics are the ones that stay, and the other replicas'
are thrown away; autograd sums the gradients of all replicas into the one set of parameters.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_cifar.strategies.network import Runner


def replica_of(num_samples: int, *, num_replicas: int) -> Tensor:
    """Which replica processes each sample of a batch, by the rule of `Tensor.chunk`.

    Every chunk but the last has `ceil(num_samples / num_replicas)` samples, so replicas at the end may get none: 5
    samples over 4 replicas are cut into 2, 2, 1.

    Returns:
        int64, (num_samples,), ascending, each in `range(num_replicas)`.
    """
    samples_per_chunk = max(1, -(-num_samples // num_replicas))
    return torch.arange(num_samples) // samples_per_chunk


def replicate(network: nn.Module, devices: Sequence[torch.device]) -> Runner:
    """The callable to use in place of `network` so that a batch is divided over `devices`.

    Args:
        network: Takes (n, ...) and returns (n, ...); already on `devices[0]`.
        devices: One for each replica; CUDA devices, which several may share, or the CPU for all of them.

    Returns:
        A plain callable, never an `nn.Module`: set as an attribute of one, it must not become its child, or every name
        in a checkpoint would change. Input and output live on `devices[0]`.
    """
    if devices[0].type == "cuda" and len(devices) > 1:
        return DeviceReplicas(network, devices)
    return VirtualReplicas(network, num_replicas=len(devices))


class VirtualReplicas:
    """Computes on one device what `nn.DataParallel` computes, which on the CPU would run the plain network.

    The replicas run one after the other. `functional_call` swaps the buffers of the one module in place, so threads
    would each need a module of their own, and would gain nothing: on the CPU one operator already uses every core.

    Args:
        network: The module whose parameters all replicas share.
        num_replicas: The largest number of chunks into which a batch is cut.
    """

    def __init__(self, network: nn.Module, *, num_replicas: int) -> None:
        self.network = network
        self.num_replicas = num_replicas

    def __call__(self, images: Tensor) -> Tensor:
        """The gathered output (n, ...) for a batch (n, ...); n may be smaller than `num_replicas`, or 0."""
        first, *others = images.chunk(self.num_replicas)
        # Copied before replica 0 updates its running statistics: all replicas start from the same buffers.
        copies = [{name: buffer.clone() for name, buffer in self.network.named_buffers()} for _ in others]
        outputs = [self.network(first)]
        outputs += [functional_call(self.network, copy, (chunk,)) for copy, chunk in zip(copies, others, strict=True)]
        return torch.cat(outputs)


class DeviceReplicas:
    """`nn.DataParallel` over several CUDA devices.

    Args:
        network: The module to replicate, on `devices[0]`.
        devices: The device of every replica.
    """

    def __init__(self, network: nn.Module, devices: Sequence[torch.device]) -> None:
        self.network = network
        self._parallel = _DataParallel(network, device_ids=[device.index for device in devices])

    def __call__(self, images: Tensor) -> Tensor:
        """The gathered output (n, ...) for a batch (n, ...) on the first device; n may be 0, which needs no replica."""
        output: Tensor = self._parallel(images) if len(images) else self.network(images)
        return output


class _DataParallel(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` whose threads run under the caller's autocast type and inference mode.

    Both are thread-local. torch hands on only that autocast is enabled, so `bf16-mixed` would silently compute in
    float16, without a gradient scaler (torch/nn/parallel/parallel_apply.py, torch 2.11 to 2.15).
    """

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        # torch only calls the modules, so functions can replace them.
        calls = cast(Sequence[nn.Module], [in_context_of_caller(replica) for replica in replicas])
        return super().parallel_apply(calls, inputs, kwargs)


def in_context_of_caller(call: Callable[..., Any], *, device_type: str = "cuda") -> Callable[..., Any]:
    """`call`, for another thread, with this thread's settings.

    Carries over the autocast state of `device_type`, inference mode and whether gradients are recorded.
    """
    dtype = torch.get_autocast_dtype(device_type)
    autocast = torch.is_autocast_enabled(device_type)
    inference = torch.is_inference_mode_enabled()
    grad = torch.is_grad_enabled()

    def run(*args: Any, **kwargs: Any) -> Any:
        # Not `inference_mode(False)`: leaving inference mode would also switch gradients on.
        mode: AbstractContextManager[Any] = torch.inference_mode() if inference else torch.set_grad_enabled(grad)
        with mode, torch.autocast(device_type, dtype=dtype, enabled=autocast):
            return call(*args, **kwargs)

    return run
