"""On which GPUs a mode is verified: each part on its own GPU, or several parts on one."""

from collections.abc import Callable
from dataclasses import replace

from lit_cifar.errors import ConfigError
from lit_cifar.tools.modes import SizedMode

# Communication that a mode needs and gloo lacks for tensors on a GPU; NCCL refuses two processes on one GPU.
_NOT_SHARED = {
    "pp": "sends activations from one to the other",
    "ddp_pp": "sends activations from one to the other",
    "fsdp2": "averages parts of gradients",
    "fsdp2-tp": "averages parts of gradients",
}

# The class that stands for a mode on one GPU, and its sizes for so many devices. All others are `ddp` with its samples.
_Sizes = Callable[[int], dict[str, int | str]]
_SHARED: dict[str, tuple[str, _Sizes]] = {
    "dp": ("DataParallelStrategy", lambda n: {"num_replicas": n}),
    "mp": ("LayerParallelStrategy", lambda n: {"num_stages": n, "num_microbatches": 1}),
    "mp-micro": ("LayerParallelStrategy", lambda n: {"num_stages": n}),
    "ddp_mp": ("OneDeviceDDPLayerParallelStrategy", lambda n: {"num_devices": n}),
    "ddp_spawn": ("OneDeviceDDPStrategy", lambda n: {"num_devices": n, "start_method": "spawn"}),
    "tp": (
        "OneDeviceShardedStrategy",
        lambda n: {"num_devices": n, "data_parallel_size": 1, "tensor_parallel_size": n},
    ),
}


def placed(mode: SizedMode, *, num_gpus: int) -> SizedMode:
    """`mode` on at most `num_gpus` GPUs; as it is on the CPU, where there are 0, and where they suffice."""
    if num_gpus == 0 or mode.devices <= num_gpus:
        return mode
    if mode.name in _NOT_SHARED:
        raise ConfigError(
            f"{mode.name} on {mode.devices} devices {_NOT_SHARED[mode.name]}, which processes on one GPU cannot; "
            f"GPUs here: {num_gpus}",
            remedy="leave it out, or pass --trainer.accelerator=cpu",
        )
    strategy, sizes = _SHARED.get(mode.name, ("OneDeviceDDPStrategy", lambda n: {"num_devices": n}))
    return replace(mode, strategy=strategy, sizes=sizes(mode.devices) | mode.sizes, devices=1)
