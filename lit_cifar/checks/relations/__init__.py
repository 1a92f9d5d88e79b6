"""Relations between two runs of anyone's training that must train the same model.

Here is what a training script may ask; Lightning's need none. Outside of `relations` each call gives the own value.
"""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # which imports torch
    from lit_cifar.checks.relations.watching import Watched

T = TypeVar("T")

session: "Watched | None" = None  # the training that the checker watches in this process


def knob(name: str, own: T) -> T:
    """The script's own value, or another that a relation needs.

    Five names have relations of their own: `accumulate`, the number of microbatches of a step; `batch_size`, the number
    of samples of a microbatch; `evaluation_batch`, the number of samples that are evaluated at once; `validate_every`,
    the steps or epochs between evaluations; `loss_scale`, a factor taken out of gradients again.
    """
    value: T = own if session is None else session.knob(name, own)
    return value


def resume() -> str | None:
    """The path of a checkpoint to go on from, or None."""
    return None if session is None else session.resume()


def save() -> str | None:
    """A path to write a checkpoint to, or None. The checker ends the training soon after it has given one."""
    return None if session is None else session.save()


def report(**values: Any) -> None:
    """Tell values to compare beside those that are found without it: numbers, tensors, modules such as averages.

    Results of an evaluation are told before the next step, or named `val...`. A file's `score` equals its `rescored`.
    """
    if session is not None:
        session.report(values)


def share(batch: T) -> T:
    """This rank's rows of a batch that all ranks have made alike: tensors in any tree, divided along dimension 0."""
    import torch.distributed as dist  # a script that never calls this should not have to wait for it

    from lit_cifar.checks.relations.batches import parted

    knob("share", None)  # the checker learns that it was asked for
    if not dist.is_initialized():
        return batch
    own: T = parted(batch, dist.get_world_size())[dist.get_rank()]
    return own
