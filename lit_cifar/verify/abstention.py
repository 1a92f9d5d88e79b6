"""When a mode cannot be judged, though nothing need be wrong with it, and why."""

from contextlib import suppress

import torch

from lit_cifar.batch_split import GhostBatches
from lit_cifar.modes import Variant
from lit_cifar.module import LitResNet

RANDOM = (
    "not judged: the network draws random numbers in training, as dropout does, and with several parts of a batch it "
    "draws others than one device; pass --virtual_replicas=2 or more, with which all modes draw the same"
)


@torch.no_grad()
def draws_random_numbers(module: LitResNet) -> bool:
    """Whether a pass in training advances torch's generator: dropout does, and so does any code that samples."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        with suppress(Exception):  # of the user's own code; `fit` says in words what is wrong
            module.network.train()(torch.zeros(4, *module.image_shape))
        return not torch.equal(before, torch.get_rng_state())


def masks_of_one_device(mode: Variant, *, accumulation: int) -> bool:
    """Whether one process passes a batch as a whole, so that it draws what one device does."""
    return mode.num_processes == 1 and mode.batch_split().ghost_batches(accumulation=accumulation) == GhostBatches()
