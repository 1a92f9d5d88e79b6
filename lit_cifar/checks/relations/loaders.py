"""Data loaders of a watched training: shortened, kept for another run, or replaced by the batches of an earlier one."""

from collections import deque
from collections.abc import Iterator, Sized
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset

from lit_cifar.checks.relations import remarks
from lit_cifar.checks.relations.batches import (
    in_batches_of,
    joined,
    num_samples,
    open_mappings,
    parted,
    sample_digests,
    tensors_in,
    with_sample_lists,
)
from lit_cifar.checks.relations.evaluation import Evaluations
from lit_cifar.checks.relations.generators import states
from lit_cifar.checks.relations.mirror import MIRROR
from lit_cifar.checks.relations.patching import before, patched
from lit_cifar.checks.relations.plan import Imposed
from lit_cifar.checks.relations.purposes import Purposes, place_in
from lit_cifar.checks.relations.switches import in_double
from lit_cifar.checks.relations.watching import Watched
from lit_cifar.checks.relations.workers import Order, Read, read_with_workers
from lit_cifar.internals import tree_leaves

_DRAWN = (data.RandomSampler, data.WeightedRandomSampler, data.DistributedSampler)
_FEW = 4  # tensors of a batch; more may be its samples


class Loaders:
    """Follows every `DataLoader` of a process."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self._plan, self._trace = watched, watched.plan, watched.trace
        # By its identity, which it keeps, a data set and its number: Lightning makes a loader once more.
        self._datasets: dict[int, tuple[int, Any]] = {}
        self._is_read_again = False
        self._trained: dict[int, Any] = {}  # loaders, by the numbers of their data sets
        self._last = WeakKeyDictionary[Any, Order]()  # of a sampler
        self._asked: int | None = None  # number of samples of the batch that was fetched last
        self._length_of, self._batches_of = DataLoader.__len__, DataLoader.__iter__
        self._scripts = watched.folder.parent / MIRROR
        self._made_at = WeakKeyDictionary[Any, str]()  # of loaders: the place in the script
        self._read_for = WeakKeyDictionary[Any, str]()  # of loaders: "train", "evaluate" or "both"
        # Of loaders: where their lengths were asked for since the last batch, and what for.
        self._lengths_asked = WeakKeyDictionary[Any, set[tuple[str, str]]]()
        self._number_of = WeakKeyDictionary[data.BatchSampler, int]()  # of the data set
        self._known = WeakKeyDictionary[data.BatchSampler, str]()  # what its batches are for, where phases do not tell

    def patch(self) -> None:
        patched(DataLoader, "__init__", self._make)
        patched(DataLoader, "__iter__", self._iterate)
        patched(DataLoader, "__len__", self._length)
        patched(data.BatchSampler, "__iter__", self._ordered)
        patched(data, "get_worker_info", self._worker)
        note = before(lambda *_, **__: self._trace.remarks.add(remarks.OF_OWN_SIZE))
        patched("accelerate.accelerator:Accelerator", "gather_for_metrics", note)

    def _make(self, make: Any, loader: Any, *args: Any, **settings: Any) -> None:
        make(loader, *args, **settings)
        if not self._is_read_again:  # workers have random numbers of their own
            self._trace.script.has_workers |= loader.num_workers > 0
            loader.lives_on = loader.persistent_workers  # what they are, not what they are here
            # Lightning makes a loader once more by these, and torch refuses what only workers need.
            alone = {"num_workers": 0, "timeout": 0, "prefetch_factor": None, "persistent_workers": False}
            vars(loader).update(alone)
            loader.multiprocessing_context = None
            loader.collate_fn = partial(self._collate, loader.collate_fn, loader.batch_sampler is not None)
        number = self._number(loader)
        if isinstance(loader.batch_sampler, data.BatchSampler):
            self._number_of[loader.batch_sampler] = number
        self._made_at[loader] = place_in(self._scripts)

    def _worker(self, own: Any) -> Any:
        """A script that has workers may not expect to be without: it has one, this process."""
        alone = SimpleNamespace(id=0, num_workers=1, seed=torch.initial_seed(), dataset=None)
        return own() or (alone if self._trace.script.has_workers else None)

    def _number(self, loader: Any) -> int:
        return self._datasets.setdefault(id(loader.dataset), (len(self._datasets), loader.dataset))[0]

    def _iterate(self, own: Any, loader: Any) -> Any:
        if _goes_on(loader):  # its constructor begins it
            _give_epochs(loader)
        elif not self._is_read_again:
            place, purpose = self._purpose(loader)
            self._read_for[loader] = purpose if self._read_for.get(loader, purpose) == purpose else "both"
            known = place in dict(self._plan.purposes)
            batches = self._training(loader, own, known) if purpose == "train" else self._evaluated(loader, own(loader))
            supposed = {*self._lengths_asked.pop(loader, ()), (place, purpose)}
            return self._trace.part(Purposes).follow(self._opened(loader, batches), supposed)
        return own(loader)

    def _opened(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self._lengths_asked.pop(loader, None)

    def _purpose(self, loader: Any) -> tuple[str, str]:
        """The place at which a loader is read, or its length; and what for."""
        place = f"{place_in(self._scripts)}, made at {self._made_at.get(loader, '')}"
        known = dict(self._plan.purposes).get(place)
        if known and isinstance(loader.batch_sampler, data.BatchSampler):
            self._known[loader.batch_sampler] = known
        return place, known or self._watched.phase()

    def _collate(self, collate: Any, has_batches: bool, samples: Any) -> Any:
        self._asked = len(samples) if has_batches else None
        return collate(samples)

    def _fetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        like = None
        for batch in batches:
            open_mappings(batch)
            batch = in_double(batch) if self._plan.double else batch  # a loss may compare it with what a model gives
            marked = batch if self._asked is None else with_sample_lists(batch, self._asked, like)
            like = marked if like is None else like
            yield marked

    def _ordered(self, own: Any, sampler: Any) -> Iterator[Any]:
        purpose = self._known.get(sampler) or self._watched.phase()
        if purpose != "train" or not isinstance(sampler.sampler, Sized):
            yield from own(sampler)
            return
        orders = self._trace.part(Read).orders
        last, begun = self._last.get(sampler), self._trace.steps
        if last and last.begun == begun:  # the script has only looked at it
            orders[:] = [one for one in orders if one is not last]
        is_drawn = isinstance(sampler.sampler, _DRAWN)
        order = Order(self._number_of.get(sampler), len(sampler.sampler), is_drawn, begun)
        self._last[sampler] = order
        orders.append(order)
        for batch in own(sampler):
            order.places += batch
            yield batch

    def _length(self, length: Any, loader: Any) -> int:
        place, purpose = self._purpose(loader)
        if place not in dict(self._plan.purposes) and (read := self._read_for.get(loader, "both")) != "both":
            purpose = read  # a script may ask when an epoch or an evaluation is over
        self._lengths_asked.setdefault(loader, set()).add((place, purpose))
        if purpose == "evaluate" and self._watched.evaluation_batch is not None:
            with torch.random.fork_rng(devices=()):  # whose order is drawn again when it is read
                return sum(1 for _ in self._evaluated(loader, self._batches_of(loader)))
        imposed = self._plan.imposed
        if imposed and purpose == "train" and (own := dict(imposed.lengths).get(self._number(loader))) is not None:
            return -(-own // imposed.window) * imposed.parts
        most = self._plan.limits.batches if purpose == "train" else self._most_evaluated
        return min(int(length(loader)), most)

    @property
    def _most_evaluated(self) -> int:
        script = self._trace.script
        return self._plan.evaluated if script.is_lightning or script.is_distributed else self._plan.limits.undivided

    def _training(self, loader: Any, iterate: Any, is_known: bool) -> Iterator[Any]:
        number, part, reading = self._number(loader), self._trace.script.batches, self._trace.reading
        most: int | None = self._plan.limits.batches
        self._trained.setdefault(number, loader)
        reading.epochs.append(0)
        is_stream = isinstance(loader.dataset, IterableDataset)
        try:
            reading.lengths[number] = read = len(loader)
            own = self._length_of(loader)
            own = min(own, part if isinstance(part, int) else int(part * own))
            if own <= read:
                most = None  # an iteration without an end may go on behind the epoch
            elif not self._plan.imposed:
                reading.cut[number] = own
        except TypeError:  # its data or its sampler have no length
            is_stream = True
        self._watched.seed("order")
        batches = iterate(loader)  # which draws a number, of the generator that may make the model next
        # A plain loop over a stream may read more than an epoch, and ends with its steps.
        if is_stream and not self._trace.script.is_lightning:
            most = None
        return self._followed(loader, len(reading.epochs) - 1, self._fetched(islice(batches, most)), is_known)

    def _followed(self, loader: Any, epoch: int, batches: Iterator[Any], is_known: bool) -> Iterator[Any]:
        imposed, samples, waiting = self._plan.imposed, list[int](), self._watched.waiting
        is_ahead = is_window = False  # it fetches the next batch before it trains one, as accelerate does; or several
        waiting.clear()
        self._watched.seed("fetch 0")  # as those that follow
        for number, batch in enumerate(imposed_batches(imposed, epoch, self._watched.rank) if imposed else batches):
            if self._watched.is_over():
                return
            self._watched.continues()
            if not number and not imposed and not is_divided(batch, self._asked):
                self._trace.remarks.add(remarks.UNDIVIDED)
            if self._plan.record:
                folder = self._watched.folder / "batches" / str(epoch)
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(batch, folder / f"{number:06d}.pt")
            self._trace.reading.epochs[epoch] += 1
            before, samples = samples, sample_digests(batch)
            self._watched.begins_batch(samples, is_known=is_known)
            waiting.extend([samples] if is_window else [])
            self._watched.follow_draws(waiting[0] if is_window else before if is_ahead else samples)
            before_it = self._watched.progress
            yield batch
            is_untrained = self._watched.progress == before_it
            is_ahead |= is_untrained and number == 0
            if is_ahead and is_untrained and number == 1:  # transformers reads all batches of a step before it
                is_window = True
                waiting.extend([before, samples])
            self._watched.fetches_batch()
        if is_ahead:
            self._watched.follow_draws(waiting[0] if waiting else samples)

    def _evaluated(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        self._watched.is_evaluating = True
        self._watched.draws.stop()
        own = [*self._fetched(islice(batches, self._most_evaluated))]
        size, asked, seen = self._watched.evaluation_batch, self._asked, self._trace.part(Evaluations)
        is_cut = len(own) == self._most_evaluated and next(batches, None) is not None
        if is_cut:
            is_stream = isinstance(loader.dataset, IterableDataset)
            seen.cut = f"{len(own)} of {'more' if is_stream else self._length_of(loader)} batches of an evaluation"
        seen.has_loader |= bool(own)
        with suppress(TypeError):  # a loader without a size of batches, or a sampler without a length
            seen.rest += 0 if loader.drop_last else len(loader.sampler) % loader.batch_size
        self._trace.remarks |= {remarks.ONE_SAMPLE} if loader.batch_size == 1 else set()
        if own and not is_divided(own[-1], asked):
            self._trace.remarks.add(remarks.UNDIVIDED_EVALUATION)
        elif own and not is_cut and loader.batch_sampler is not None and self._plan.ranks == 1:
            with suppress(TypeError, ValueError):  # a sampler without a length; a batch that is not divided
                seen.left_out = max(seen.left_out, len(loader.sampler) - sum(map(num_samples, own)))
        is_kept = remarks.UNDIVIDED_EVALUATION in self._trace.remarks
        unread = deque(own if size is None or is_kept else in_batches_of(own, size))
        try:
            while unread:
                drawn = states()
                yield unread.popleft()
                if states() != drawn:
                    self._trace.remarks.add(remarks.IN_EVALUATION)
        finally:
            self._watched.is_evaluating = False
            if unread and not self._trace.script.is_lightning:  # whose validations go on behind an error
                self._trace.remarks.add(remarks.FIRST_BATCHES)

    def read_again(self) -> None:
        """Read the loaders that trained once more, with workers of their own."""
        self._is_read_again = True
        for loader in [*self._trained.values()][:3]:
            read_with_workers(loader, self._trace.part(Read))


def _goes_on(loader: Any) -> bool:
    """Whether its epochs are parts of one iteration without an end, as of timm's `MultiEpochsDataLoader`."""
    has_own = type(loader).__iter__ is not DataLoader.__iter__
    repeated = getattr(loader.batch_sampler, "sampler", None)
    return has_own and isinstance(repeated, data.BatchSampler) and sized_len(loader.batch_sampler) is None


def _give_epochs(loader: Any) -> None:
    """Let each iteration be an epoch; the loader keeps its other methods."""
    object.__setattr__(loader, "batch_sampler", loader.batch_sampler.sampler)
    own = {"__iter__": DataLoader.__iter__, "__len__": DataLoader.__len__}
    loader.__class__ = type(type(loader).__name__, (type(loader),), own)


def is_divided(batch: Any, asked: int | None) -> bool:
    """Whether a batch is divided into the samples that the loader was asked for; None if it makes batches by itself."""
    try:
        size = num_samples(batch)
    except ValueError:
        return False
    counts = [its for its in tree_leaves(batch) if type(its) is int or (isinstance(its, Tensor) and not its.dim())]
    if any(count >= size for count in counts):  # such as of the samples or tokens of this batch
        return False
    if asked is None:
        return len(tensors_in(batch)) <= _FEW
    return size == asked


def imposed_batches(imposed: Imposed, epoch: int, rank: int) -> Iterator[Any]:
    """The batches of an epoch of the run whose ranks have their folders in `imposed.folder`."""
    ranks = range(imposed.ranks) if imposed.ranks else [rank]
    folders = [Path(imposed.folder, f"{of_rank}/batches/{imposed.first_epoch + epoch}") for of_rank in ranks]
    names = sorted(set.intersection(*({file.name for file in folder.glob("*.pt")} for folder in folders)))
    names = names[imposed.skip :] if epoch == 0 else names
    for start in range(0, len(names), imposed.window):
        window = [folder / name for name in names[start : start + imposed.window] for folder in folders]
        batches = [torch.load(file, weights_only=False) for file in window]
        open_mappings(batches)
        one = batches[0] if len(batches) == 1 else joined(batches)
        if imposed.multiple > 1:
            size = num_samples(one) // imposed.multiple * imposed.multiple
            if not size:
                continue
            one = next(in_batches_of([one], size))
        yield from [one] if imposed.parts == 1 else parted(one, imposed.parts)
