"""Workers of a data loader draw random numbers of their own, in each epoch others, and read each sample once."""

from collections.abc import Iterator
from typing import Any

from lit_cifar.checks.relations.runs import Runs, Verdict

NAME = "workers"


def workers(runs: Runs) -> Iterator[Verdict]:
    loaders = runs.run(probe_loaders=True)[0].loaders
    if not loaders:
        yield Verdict(NAME, "abstain", "it reads no DataLoader of torch")
        return
    found = [text for seen in loaders for text in (_of_stream(seen) if seen["stream"] else _of_samples(seen))]
    looked_at = f"{len(loaders)} loaders, without workers and with 2"
    yield Verdict(NAME, "fail" if found else "pass", "; ".join(found), looked_at, found)


def _of_samples(seen: dict[str, Any]) -> Iterator[str]:
    """What `loaders` has seen of one sample that was asked for again and again."""
    (first, second), (first_alone, second_alone) = seen["2"], seen["0"]
    if len({*first_alone, *second_alone}) == 1 == len({*first, *second}):
        return  # no random changes
    if first == second and first_alone != second_alone:
        yield "with two workers each epoch repeats the random changes of the one before"
    if first[0::2] == first[1::2] and first_alone[0::2] != first_alone[1::2]:
        yield "two workers make the same random changes"


def _of_stream(seen: dict[str, Any]) -> Iterator[str]:
    alone, two = seen["0"], seen["2"]
    again = sum(two[sample] > alone[sample] for sample in alone)
    if again > len(alone) / 2:
        remedy = "divide the stream by torch.utils.data.get_worker_info()"
        yield f"two workers read {again} of {len(alone)} samples twice: {remedy}"
