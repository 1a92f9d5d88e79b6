"""On which GPUs a mode is verified: each part on its own GPU, or several parts on one."""

from dataclasses import replace

from lit_cifar.errors import ConfigError
from lit_cifar.strategies.modes import Variant

# Communication that a mode needs and gloo lacks for tensors on a GPU; NCCL refuses two processes on one GPU.
_NOT_SHARED = {
    "pp": "sends activations from one to the other",
    "ddp_pp": "sends activations from one to the other",
    "fsdp2": "averages parts of gradients",
    "fsdp2-tp": "averages parts of gradients",
}


def placed(mode: Variant, *, num_gpus: int) -> Variant:
    """`mode` on at most `num_gpus` GPUs; as it is on the CPU, where there are 0, and where they suffice."""
    if num_gpus == 0 or mode.devices <= num_gpus:
        return mode
    if mode.name in _NOT_SHARED:
        raise ConfigError(
            f"{mode.name} on {mode.devices} devices {_NOT_SHARED[mode.name]}, which processes on one GPU cannot; "
            f"GPUs here: {num_gpus}",
            remedy="leave it out, or pass --trainer.accelerator=cpu",
        )
    if mode.name == "dp":
        return replace(mode, strategy="DataParallelStrategy", sizes={"num_replicas": mode.devices}, devices=1)
    if mode.name in ("mp", "mp-micro"):
        sizes = {"num_stages": mode.devices, "num_microbatches": 1} | mode.sizes
        return replace(mode, strategy="LayerParallelStrategy", sizes=sizes, devices=1)
    return _of_processes(mode)


def _of_processes(mode: Variant) -> Variant:
    sizes = {"num_devices": mode.devices} | mode.sizes
    match mode.name:
        case "tp":
            strategy, sizes = (
                "OneDeviceShardedStrategy",
                sizes | {"data_parallel_size": 1, "tensor_parallel_size": mode.devices},
            )
        case "ddp_mp":
            strategy = "OneDeviceDDPLayerParallelStrategy"
        case "ddp_spawn":
            strategy, sizes = "OneDeviceDDPStrategy", sizes | {"start_method": "spawn"}
        case _:
            strategy = "OneDeviceDDPStrategy"
    return replace(mode, strategy=strategy, sizes=sizes, devices=1)
