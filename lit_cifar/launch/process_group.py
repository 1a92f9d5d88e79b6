"""Destroys a process's process group at its end, while the interpreter still runs."""

import gc
import sys

import torch.distributed as dist


def destroy_process_group_at_exit() -> None:
    """Destroy the default process group and all others, if there are any. To be registered with `atexit`.

    Lightning does this for NCCL only. A gloo group that is still there when the interpreter shuts down can abort a run
    that had finished ("terminate called without an active exception", SIGABRT): its threads may then release the last
    reference to a tensor, for which they need an interpreter that is gone (pytorch/pytorch#179291).
    """
    if dist.is_available() and dist.is_initialized():
        # A group's threads end with the last reference to it. Trainers in reference cycles and frames of errors hold
        # some. Drop these first: only torch's own release of a group waits for the threads without holding the GIL.
        sys.last_value = sys.last_traceback = None
        gc.collect()
        dist.destroy_process_group()
