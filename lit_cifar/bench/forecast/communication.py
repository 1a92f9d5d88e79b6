"""What messages between devices cost: the latency of each, and bytes over bandwidth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Between neighbouring devices.

    Attributes:
        latency_s: Seconds until an empty message has arrived.
        bytes_per_s: In each direction.
    """

    latency_s: float
    bytes_per_s: float

    def send(self, num_bytes: float) -> float:
        """Seconds of a message to one other device."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def all_reduce(self, count: int, num_bytes: float) -> float:
        """Seconds of an all-reduce of `num_bytes` over `count` devices, in a ring or in trees, whichever is faster.

        In a ring each sends 2 (count - 1) messages of 1/count of the bytes, which is the least (Patarasuk and Yuan
        2009). Two binary trees, as NCCL has them, send a little more in fewer steps (Sanders, Speck and Traeff 2009).
        """
        ring = 2 * self.all_gather(count, num_bytes)
        trees = 2 * math.ceil(math.log2(count)) * self.latency_s + 2 * num_bytes / self.bytes_per_s
        return min(ring, trees)

    def all_gather(self, count: int, num_bytes: float) -> float:
        """Seconds until each of `count` devices has all `num_bytes`, of which it had its share: half an all-reduce.

        A reduce-scatter takes as long.
        """
        return (count - 1) * self.send(num_bytes / count)

    def broadcast(self, count: int, num_bytes: float) -> float:
        """Seconds until `count` devices have what one had: a tree or a chain of pieces, whichever is faster.

        Source: Chan et al. 2007, Collective communication: theory, practice, and experience.
        """
        tree = math.ceil(math.log2(count)) * self.send(num_bytes)
        chain = (count - 1) * self.latency_s + num_bytes / self.bytes_per_s
        return min(tree, chain) if count > 1 else 0.0


def link_from_sweep(seconds: dict[int, float], *, count: int) -> Interconnect:
    """The link that explains measured all-reduces best.

    Args:
        seconds: Of an all-reduce, by its number of bytes. Two sizes or more.
        count: Devices that took part, two or more.
    """
    steps = 2 * (count - 1)
    latency, per_byte = two_terms(
        [steps] * len(seconds), [steps / count * num_bytes for num_bytes in seconds], list(seconds.values())
    )
    return Interconnect(latency_s=latency, bytes_per_s=1 / per_byte if per_byte > 0 else math.inf)


def two_terms(first: Sequence[float], second: Sequence[float], found: Sequence[float]) -> tuple[float, float]:
    """Find a and b, not negative, for which a * first + b * second comes nearest to `found`.

    Least squares of the relative errors, so that short times count as much as long ones.
    """
    x, y = ([value / time for value, time in zip(values, found, strict=True)] for values in (first, second))
    xx, yy, xy = (sum(map(mul, *pair)) for pair in ((x, x), (y, y), (x, y)))
    determinant = xx * yy - xy * xy
    a = (yy * sum(x) - xy * sum(y)) / determinant
    b = (xx * sum(y) - xy * sum(x)) / determinant
    if a < 0:
        return 0.0, sum(y) / yy
    if b < 0:
        return sum(x) / xx, 0.0
    return a, b
