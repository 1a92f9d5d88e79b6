"""The samples of each process at each step: one order per epoch, cut the same way for any number of processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lit_cifar.data.counter_rng import Purpose, keyed_permutation
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.mode import Layout

FULL_BATCHES = "pass --data.order.drop_last=true, or change --data.batch_size or --data.val_size"


class BatchIds(NamedTuple):
    """One process's samples of one step: `ids` is int64, (n,); `weight` as in `lit_cifar.data.images.Batch`."""

    ids: Tensor
    weight: float
    # Of the global batch, or of an evaluation's step `ids` themselves: what each sample is augmented by, int64, (B,),
    # its id, or another number with this remainder by the number of samples; and where `ids` are among them.
    keys: Tensor
    place: slice = slice(None)
    step: int = 0  # number of a training step in the epoch

    @property
    def partners(self) -> Tensor:
        """Keys of the samples before `ids` in the global batch, int64, (n,); the last is before the first."""
        return self.keys.roll(1)[self.place]


@dataclass(kw_only=True)
class TrainSampler:
    """Global batches in the order of a keyed permutation, each cut among data-parallel ranks and accumulation steps.

    The permutation of an epoch is a function of (seed, epoch). Global batch `b` holds its positions
    `b * batch_size` to `(b + 1) * batch_size - 1`. Of these, accumulation step `a` of rank `r` of `R` takes
    every `P`-th one from `a * R + r`, with `P = accumulation * R`. So every optimizer step sees the same
    samples however many processes there are and however often they accumulate, and all parts are equally large,
    but for the last batch, whose parts may differ by one sample and carry their weights.
    """

    num_samples: int
    batch_size: int  # samples per optimizer step, over all replicas and accumulation steps
    layout: Layout  # this process's part of a batch
    accumulation: int = 1  # loader steps per optimizer step (`accumulate_grad_batches`)
    seed: int = 0  # key of the permutation
    shuffle: bool = True  # with False every epoch is in the order of the ids, for `overfit_batches`
    frozen: bool = False  # repeat the order of epoch 0, as if `set_epoch` were forgotten
    drop_last: bool = False  # leave out a last batch that is not full
    balanced: Tensor | None = None  # labels of all samples, int64, (num_samples,), to draw the classes equally often
    epoch: int = 0  # the epoch to iterate over
    # Returns the number of loader steps that were taken before a Trainer resumed within the epoch. None without a
    # Trainer. Lengths stay those of whole epochs, because Lightning continues to count where the checkpoint ended.
    behind: Callable[[], int] | None = None
    _entered: bool = field(default=False, init=False, repr=False)  # whether Lightning iterates next

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Lightning calls this after `iter`, which therefore must draw nothing."""
        self.epoch, self._entered = epoch, True

    def order(self) -> Tensor:
        """The ids of this epoch in order, int64, (num_samples,)."""
        return self.keys() % self.num_samples

    def keys(self) -> Tensor:
        """The keys of this epoch in order, int64, (num_samples,), all of them different: see `BatchIds`.

        Those of a sample that is used k times are its id plus 0 to k - 1 times `num_samples`.
        """
        if not self.shuffle:
            return torch.arange(self.num_samples)
        epoch = 0 if self.frozen else self.epoch
        order = keyed_permutation(self.num_samples, seed=self.seed, epoch=epoch, purpose=Purpose.ORDER)
        return order if self.balanced is None else _balanced(self.balanced, seed=self.seed, epoch=epoch)[order]

    @property
    def num_batches(self) -> int:
        """Optimizer steps in an epoch."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    def __len__(self) -> int:
        """Loader steps in an epoch, the same on every process."""
        return self.num_batches * self.accumulation

    def __iter__(self) -> Iterator[BatchIds]:
        # A user's callback that iterates too gets the whole epoch.
        start, self._entered = (self.behind() if self.behind is not None and self._entered else 0), False
        yield from islice(self._whole(), start, None)

    def _whole(self) -> Iterator[BatchIds]:
        num_parts = self.accumulation * self.layout.data_parallel_size
        batches = torch.split(self.keys(), self.batch_size)
        for number, keys in enumerate(batches[: self.num_batches]):
            for step in range(self.accumulation):
                start = step * self.layout.data_parallel_size + self.layout.data_parallel_rank
                place = slice(start, None, num_parts)
                ids = keys[place] % self.num_samples
                yield BatchIds(ids, len(ids) * num_parts / len(keys), keys, place, number)

    def check(self) -> None:
        """Refuse sizes that cannot be cut evenly, or leave fewer than two samples to be normalised together."""
        size, microbatches = self.batch_size, self.layout.num_microbatches
        parts = self.layout.num_replicas * self.accumulation * microbatches
        # A replica can work with one sample, a microbatch needs two.
        least = 2 * parts if microbatches > 1 else parts
        if size < least or size % parts:
            nearest = sorted({max(full * parts, least) for full in (size // parts, -(-size // parts))})
            of_two = " of at least 2 samples" if microbatches > 1 else ""
            problem = f"--data.batch_size={size} is the global batch and does not divide among {self._cut}{of_two}"
            remedy = "the nearest that do: " + " or ".join(f"--data.batch_size={size}" for size in nearest)
            raise ConfigError(problem, remedy=remedy)
        if not self.num_batches:
            problem = f"--data.order.drop_last=true leaves none of {self.num_samples} images: --data.batch_size={size}"
            raise ConfigError(problem, remedy="lower --data.batch_size, or pass --data.order.drop_last=false")
        rest = 0 if self.drop_last else self.num_samples % size
        replicas = GhostBatches.of(self.layout, accumulation=self.accumulation).positions(rest)
        if any(len(chunk) < 2 for chunks in replicas for chunk in chunks):
            problem = f"the last batch has {rest} of {self.num_samples} images for {self._cut}; each needs 2"
            raise ConfigError(problem, remedy=FULL_BATCHES)

    @property
    def _cut(self) -> str:
        replicas, microbatches = self.layout.num_replicas, self.layout.num_microbatches
        steps = f" x {self.accumulation} accumulation steps" if self.accumulation > 1 else ""
        pieces = f" x {microbatches} microbatches" if microbatches > 1 else ""
        return f"{replicas} replica{'s' if replicas > 1 else ''}{steps}{pieces}"


def _balanced(labels: Tensor, *, seed: int, epoch: int) -> Tensor:
    """As many keys as `labels` has, int64, in which the classes that occur are equally frequent, but for one sample.

    The samples of a class take turns, in an order of this epoch, so that they are used equally often, but for once.
    """
    mixed = keyed_permutation(len(labels), seed=seed, epoch=epoch, purpose=Purpose.BALANCE)
    by_class = mixed[labels[mixed].argsort(stable=True)]
    sizes = torch.bincount(labels)
    sizes = sizes[sizes > 0]
    classes = (torch.arange(len(labels)) + epoch) % len(sizes)  # the remainder goes to other classes in each epoch
    turns = torch.arange(len(labels)) // len(sizes)
    ids = by_class[(sizes.cumsum(0) - sizes)[classes] + turns % sizes[classes]]
    return ids + len(labels) * (turns // sizes[classes])


@dataclass(kw_only=True)
class EvaluationSampler:
    """Each sample once, rank `r` of `R` taking positions r, r + R, ...; every process makes equally many steps."""

    num_samples: int
    # Samples per step over all ranks, rounded up to a multiple of their number. A rank may have none of the last step.
    batch_size: int
    layout: Layout  # this process's part of a batch
    epoch: ClassVar[int] = 0  # every evaluation has the order of the ids
    # Repeat the first samples until ranks have equally many, as DistributedSampler does. Counts are then too high.
    pad: bool = False

    def _ids(self) -> Tensor:
        missing = -self.num_samples % self.layout.data_parallel_size if self.pad else 0
        return torch.arange(self.num_samples + missing) % self.num_samples

    @property
    def _step(self) -> int:
        return -(-self.batch_size // self.layout.data_parallel_size) * self.layout.data_parallel_size

    def __len__(self) -> int:
        return -(-len(self._ids()) // self._step)

    def __iter__(self) -> Iterator[BatchIds]:
        for batch in torch.split(self._ids(), self._step):
            ids = batch[self.layout.data_parallel_rank :: self.layout.data_parallel_size]
            yield BatchIds(ids, 1.0, ids)
