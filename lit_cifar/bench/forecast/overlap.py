"""How much of the messages is left to wait for when they pass while gradients are computed."""

from collections.abc import Callable, Iterator, Sequence

from lit_cifar.bench.forecast.inputs import Layer

Seconds = Callable[[float], float]  # of a message of so many bytes
BACKWARD = 2 / 3
"""Of the time of forward and backward: backward computes the gradients of inputs and of weights."""
_FIRST_BUCKET = 2**20
_BUCKET = 25 * 2**20


def gradient_buckets(layers: Sequence[Layer]) -> Iterator[tuple[int, float]]:
    """Bytes of each bucket of DistributedDataParallel, and the share of backward after which it is full.

    The first has 1 MiB, the others 25 MiB, as by default; gradients become ready from the last layer to the first
    (Li et al. 2020). Those of a layer are taken to become ready evenly while its backward pass runs.
    """
    total = sum(layer.flop for layer in layers)
    room, filled, done = _FIRST_BUCKET, 0, 0.0
    for layer in reversed(layers):
        left = layer.parameter_bytes
        if not left:
            done += layer.flop / total
        while left:
            taken = min(left, room)
            left, room, filled = left - taken, room - taken, filled + taken
            done += layer.flop / total * taken / layer.parameter_bytes
            if not room:
                yield filled, done
                room, filled = _BUCKET, 0
    if filled:
        yield filled, done


def all_reduce_behind_backward(
    layers: Sequence[Layer], backward_s: float, reduce: Seconds, *, overlap: float
) -> tuple[float, float]:
    """Seconds of all messages, and those that remain when backward has ended (Li et al. 2020, section 3.2.3).

    A bucket is sent when it is full and the one before it has been sent.

    Args:
        layers: Of the network.
        backward_s: Seconds of its backward pass.
        reduce: All-reduce.
        overlap: The part of the messages that may pass during backward.
    """
    total = end = 0.0
    for num_bytes, done in gradient_buckets(layers):
        seconds = reduce(num_bytes)
        total += seconds
        end = max(end, done * backward_s) + seconds
    hidden = max(0.0, end - backward_s)
    return total, overlap * hidden + (1 - overlap) * total


def gathered_ahead(layers: Sequence[Layer], passes_s: float, gather: Seconds, *, overlap: float) -> tuple[float, float]:
    """Seconds of all messages of FSDP, and those in which nothing is computed.

    Each layer's parameters are gathered while the layer before computes, in forward and again in backward; its
    gradients are reduced and scattered while the next computes (Rajbhandari et al. 2020, section 7; Zhao et al. 2023).

    Args:
        layers: Of the network.
        passes_s: Seconds of forward and backward.
        gather: All-gather; a reduce-scatter takes as long.
        overlap: The part of the messages that may pass while a layer computes.
    """
    total = sum(layer.flop for layer in layers)
    gathers = [gather(layer.parameter_bytes) if layer.parameter_bytes else 0.0 for layer in layers]
    messages = 3 * sum(gathers)
    forward = [(1 - BACKWARD) * passes_s * layer.flop / total for layer in layers]
    exposed = gathers[0] + sum(map(_wait, [*gathers[1:], 0.0], forward))
    # Beside the backward pass of a layer: the gather of the one before it, the reduce-scatter of the one after it.
    before, after = [0.0, *gathers[:-1]], [*gathers[1:], 0.0]
    backward = [BACKWARD / (1 - BACKWARD) * seconds for seconds in forward]
    exposed += gathers[-1] + sum(_wait(a + b, seconds) for a, b, seconds in zip(before, after, backward, strict=True))
    exposed += gathers[0]
    return messages, overlap * exposed + (1 - overlap) * messages


def _wait(messages_s: float, compute_s: float) -> float:
    return max(0.0, messages_s - compute_s)
