"""What a copy has done wrong: compares what has arrived with what was sent and with what was there before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["lost", "stale", "torn", "delayed", "flipped", "corrupt", "hung", "failed"]

SENTINEL = 0x5A5AA5A55A5AA5A5
"""What each int64 word of a destination holds before a copy."""
_MAX_FLIPPED_BITS = 8


@dataclass(frozen=True)
class CopyFault:
    """Copies from one device to another that did not do what they should.

    Attributes:
        source: Name of the device that sent, e.g. "cuda:0".
        destination: Name of the device that received.
        kind: "lost": the destination kept its old content. "stale": it got what had been sent earlier. "torn": a part
            has not arrived. "delayed": the content was complete only after the copy was said to be. "flipped": some
            bits differ. "corrupt": anything else arrived. "hung": the copy did not end. "failed": it raised an error.
        num_bytes: Size of the copy; 0 if it is unknown.
        detail: What was seen, without a full stop.
    """

    source: str
    destination: str
    kind: Kind
    num_bytes: int
    detail: str

    def __str__(self) -> str:
        """One sentence."""
        size = f" of {size_of(self.num_bytes)}" if self.num_bytes else ""
        return f"a copy{size} from {self.source} to {self.destination} {_VERBS[self.kind]}: {self.detail}"


_VERBS: dict[Kind, str] = {
    "lost": "was lost",
    "stale": "brought old data",
    "torn": "was torn",
    "delayed": "arrived late",
    "flipped": "flipped bits",
    "corrupt": "brought wrong data",
    "hung": "hung",
    "failed": "failed",
}


def size_of(num_bytes: int) -> str:
    """A size to read: 4 KiB, 64 MiB."""
    for factor, unit in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:g} {unit}"
    return f"{num_bytes} bytes"


def classify(arrived: Tensor, sent: Tensor, *, earlier: Sequence[Tensor] = ()) -> tuple[Kind, str]:
    """The kind of a fault, and what was seen.

    Args:
        arrived: int64, on the host; differs from `sent`.
        sent: int64, of the same shape.
        earlier: What earlier copies sent.
    """
    wrong = arrived != sent
    num_wrong, num_words = int(wrong.sum()), arrived.numel()
    old = arrived == SENTINEL
    stale = torch.stack([old & False, *(arrived == content for content in earlier)])
    if old.all():
        return "lost", "the destination kept its old content"
    if stale.all(1).any():
        return "stale", "the destination holds what an earlier copy sent"
    flipped = _flipped_bits(arrived[wrong].tolist(), sent[wrong].tolist()) if num_wrong <= _MAX_FLIPPED_BITS else 0
    if 0 < flipped <= _MAX_FLIPPED_BITS:
        return "flipped", f"{flipped} bit{'s' * (flipped > 1)} of {num_words * 64:,} differ{'s' * (flipped == 1)}"
    if (old | stale.any(0))[wrong].all():
        return "torn", f"{num_wrong * 8:,} of {num_words * 8:,} bytes did not arrive"
    zero = ", all of them zero" if not arrived[wrong].any() else ""
    return "corrupt", f"{num_wrong * 8:,} of {num_words * 8:,} bytes are wrong{zero}"


def _flipped_bits(arrived: Sequence[int], sent: Sequence[int]) -> int:
    return sum(((one ^ other) & (2**64 - 1)).bit_count() for one, other in zip(arrived, sent, strict=True))
