"""When a mode cannot be judged, though nothing need be wrong with it, and why."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.strategies.modes import Variant
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.verify.record import Record

RANDOM = (
    "not judged: the network draws random numbers in training, as dropout does, and with several parts of a batch it "
    "draws others than one device; pass --virtual_replicas=2 or more, with which all modes draw the same"
)

ROUNDING = (
    "not judged: it is further from one device than measured rounding, but not in float64, so this is rounding or a "
    "mistake of this precision alone; pass --virtual_replicas=2 or more, with which no bit may differ"
)


def other_weights(alone: Record, added_callbacks: Sequence[str]) -> str | None:
    """Why evaluations and checkpoints cannot be judged by the steps of a run; None if they can.

    With a callback that averages weights, as EMA does, one device itself evaluates or saves others than it trains.
    Without any callback of the user's, that would be a mistake.
    """
    problems = alone.own_problems() if added_callbacks else []
    if not problems:
        return None
    return (
        f"not judged beyond its steps: with {', '.join(added_callbacks)} one device itself evaluates or saves other "
        f"weights than those of its steps ({problems[0]}); leave the callback out to have the rest judged"
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
