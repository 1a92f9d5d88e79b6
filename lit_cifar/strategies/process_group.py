"""How a process leaves its process group: orderly, while the interpreter is still alive."""

import torch.distributed as dist


def destroy_process_group_at_exit() -> None:
    """End the default process group, if there is one. To be registered with `atexit`.

    Lightning does this for NCCL only. A gloo group that is still there when the interpreter shuts down can abort a run
    that had finished ("terminate called without an active exception", SIGABRT): its threads may then release the last
    reference to a tensor, for which they need an interpreter that is gone (pytorch/pytorch#179291).
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
