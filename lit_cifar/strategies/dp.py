"""`dp`: the batch divided over the local devices of one process. Lightning removed its own in release 2.

Replicas are on CUDA devices, or on virtual ones on the CPU that compute the same function. A batch is cut by
`Tensor.chunk`. Every chunk has its own BatchNorm statistics. Replica 0 works on the network's own buffers, so its
running statistics are kept. Autograd sums the gradients of all replicas into the one set of parameters. Loss and
metrics are computed from the gathered output on the root device, as on a single one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lit_cifar.mode import ForwardFn
from lit_cifar.models.random_streams import draw_for_part
from lit_cifar.strategies.base import SingleProcessStrategy


class EmulatedReplicas:
    """Computes on one device what `nn.DataParallel` computes, which on the CPU would run the plain network.

    The replicas run one after the other, as on the CPU one operator already uses every core.
    """

    def __init__(self, network: nn.Module, *, num_replicas: int) -> None:
        self.network = network
        self.num_replicas = num_replicas

    def __call__(self, images: Tensor) -> Tensor:
        """The gathered output (n, ...) for a batch (n, ...); n may be smaller than `num_replicas`, or 0."""
        first, *others = images.chunk(self.num_replicas)
        # These copies are made before replica 0 updates its running statistics: all start from the same buffers.
        copies = [{name: buffer.clone() for name, buffer in self.network.named_buffers()} for _ in others]
        outputs = [self.network(first)]
        for replica, (copy, chunk) in enumerate(zip(copies, others, strict=True), start=1):
            draw_for_part(replica)
            outputs.append(functional_call(self.network, copy, (chunk,)))
        return torch.cat(outputs)


class _DataParallel(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` whose threads run under the caller's autocast type and inference mode.

    torch hands on only that autocast is enabled (torch/nn/parallel/parallel_apply.py, torch 2.11 to 2.15): `bf16-mixed`
    would silently compute in float16, without a gradient scaler.
    """

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        # torch only calls the modules, so functions can replace them.
        calls = cast(Sequence[nn.Module], [in_context_of_caller(replica) for replica in replicas])
        return super().parallel_apply(calls, inputs, kwargs)


def in_context_of_caller(call: Callable[..., Any], *, device_type: str = "cuda") -> Callable[..., Any]:
    """Return `call` for another thread, with this one's inference and gradient mode, and autocast of `device_type`."""
    dtype = torch.get_autocast_dtype(device_type)
    autocast = torch.is_autocast_enabled(device_type)
    inference = torch.is_inference_mode_enabled()
    grad = torch.is_grad_enabled()

    def run(*args: Any, **kwargs: Any) -> Any:
        # `inference_mode(False)` would also switch gradients on.
        mode: AbstractContextManager[Any] = torch.inference_mode() if inference else torch.set_grad_enabled(grad)
        with mode, torch.autocast(device_type, dtype=dtype, enabled=autocast):
            return call(*args, **kwargs)

    return run


class DataParallelStrategy(SingleProcessStrategy):
    """One process, one replica of the network per local device, each with its chunk of every batch.

    It equals one device that normalises each chunk by itself; running statistics are those of replica 0.

    Args:
        num_replicas: Number of replicas, a multiple of the number of devices; by default one for each device.
    """

    strategy_name = "dp"

    def __init__(self, num_replicas: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_replicas = num_replicas

    @property
    @override
    def local_replicas(self) -> int:
        return len(self.devices) if self.num_replicas is None else self.num_replicas

    @override
    def replica_of(self, num_samples: int) -> Tensor:
        """Which replica processes each sample of a batch of `num_samples`: int64, (num_samples,).

        The rule is that of `Tensor.chunk`: every chunk but the last has `ceil(num_samples / replicas)` samples, so
        replicas at the end may get none. 5 samples over 4 replicas are cut into 2, 2, 1.
        """
        if self.virtual_parts is not None:
            return torch.zeros(num_samples, dtype=torch.int64)
        samples_per_chunk = max(1, -(-num_samples // self.local_replicas))
        return torch.arange(num_samples) // samples_per_chunk

    def make_forward_fn(self, network: nn.Module) -> ForwardFn:
        devices = self.copying_devices[0]  # CUDA devices, which several replicas may share, or the CPU for all of them
        if self.virtual_parts is not None:  # they pass one after the other: other devices would only wait in turn
            return network.__call__
        if devices[0].type != "cuda" or len(devices) == 1:
            return EmulatedReplicas(network, num_replicas=len(devices))
        parallel = _DataParallel(network, device_ids=[device.index for device in devices])

        def run(images: Tensor) -> Tensor:
            for replica, device in enumerate(devices):
                draw_for_part(replica, device=device)
            output: Tensor = parallel(images) if len(images) else network(images)
            return output

        return run

    @property
    @override
    def copying_devices(self) -> list[list[torch.device]]:
        each = self.local_replicas // len(self.devices)
        return [[device for device in self.devices for _ in range(each)]]

    def check(self) -> None:
        super().check()
        self.check_divides("num_replicas", self.local_replicas)
