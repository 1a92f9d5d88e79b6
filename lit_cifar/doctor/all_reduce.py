"""All-reduce with integers that say who has sent them, so that a wrong sum says what is missing.

Rank r sends r + 1 times a pattern that changes with every call. Each sum is an integer below 2**24, which is exact.
"""

import torch
from torch import Tensor

SIZES = tuple(1024 * 8**power for power in range(6))
"""In bytes: 1 KiB to 32 MiB."""
_PERIOD = 251  # a prime, so that a block that arrives in the wrong place is seen
_STEP = 7


def pattern(num_values: int, *, call: int, device: torch.device) -> Tensor:
    """What all ranks send multiples of in the call of that number; no value is that of the call before."""
    return ((torch.arange(num_values, device=device) + _STEP * call) % _PERIOD + 1).float()


def weight(rank: int) -> int:
    """The multiple that `rank` sends."""
    return rank + 1


def total(world_size: int) -> int:
    """The multiple that arrives."""
    return sum(weight(rank) for rank in range(world_size))


def fault(result: Tensor, *, call: int, rank: int, world_size: int) -> str | None:
    """What is wrong with the result of an all-reduce, in words; None if nothing is.

    Args:
        result: What `rank` holds after the call.
        call: The call's number.
        rank: Who holds it.
        world_size: Number of ranks that have sent something.
    """
    now = pattern(result.numel(), call=call, device=result.device)
    wrong = result != total(world_size) * now
    if not bool(wrong.any()):
        return None
    before = pattern(result.numel(), call=call - 1, device=result.device)
    return _cause(result[wrong], now[wrong], before[wrong], rank=rank, world_size=world_size) + _place(wrong)


def _cause(found: Tensor, now: Tensor, before: Tensor, *, rank: int, world_size: int) -> str:
    whole = total(world_size)
    for other in range(world_size):
        if torch.equal(found, (whole - weight(other)) * now):
            return f"the values of rank {other} are missing"
    if torch.equal(found, weight(rank) * now):
        return "the values of all other ranks are missing"
    if torch.equal(found, whole * before):
        return "it is the result of the call before"
    return "it holds numbers that no rank has sent"


def _place(wrong: Tensor) -> str:
    num_wrong = int(wrong.sum())
    if num_wrong == wrong.numel():
        return ""
    return f", in {num_wrong} of {wrong.numel()} places from {int(wrong.nonzero()[0])} on"
