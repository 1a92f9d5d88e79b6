"""Findings about the samples that ranks read in an epoch."""

import copy
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Subset

from lit_cifar import internals
from lit_cifar.checks.repeated_step.digests import checksum
from lit_cifar.checks.replay.evaluation import Evaluation, judge_evaluation
from lit_cifar.checks.replay.states import gathered
from lit_cifar.checks.replay.verdict import Finding, Report, empty_report
from lit_cifar.mode import mode_of


@dataclass
class Reading:
    """The samples that one pass over a loader has asked its data set for, batch by batch."""

    loader_sampler: Any  # the sampler that makes the batches
    dataset: Any
    batches: list[list[int]] = field(default_factory=list)
    is_whole: bool = False
    trains: bool = False

    def samples(self, num_batches: int | None = None) -> list[int]:
        """Numbers of the samples in the whole data set, of which a `Subset` holds some."""
        ids, dataset = [sample for batch in self.batches[:num_batches] for sample in batch], self.dataset
        while isinstance(dataset, Subset):
            ids, dataset = [int(dataset.indices[number]) for number in ids], dataset.dataset
        return ids

    def pass_of(self, num_batches: int | None = None) -> "Pass":
        """The pass in the form that is sent to rank 0."""
        sampler = self.loader_sampler
        while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
            sampler = inner
        every = [*range(len(self.dataset))] if isinstance(self.dataset, Subset) else []
        return Pass(
            self.samples(num_batches),
            sized_len(self.dataset) or 0,
            Reading(sampler, self.dataset, [every]).samples(),
            checksum(self.dataset),
            is_drawn=isinstance(sampler, RandomSampler) or hasattr(sampler, "set_epoch"),
            is_divided=isinstance(sampler, DistributedSampler),
        )


@dataclass
class Pass:
    """One rank's reading of its data set in an epoch."""

    samples: list[int]
    size: int  # size of the data set; 0 if it does not tell
    subset: list[int]  # all samples of the data set, if it is a part of another
    checksum: int | None  # checksum of the data set, if it can be pickled
    is_drawn: bool  # whether each epoch should have an order of its own
    is_divided: bool  # whether the sampler gives each rank a share of one order


class ReadIds:
    """Notes the samples that this process's loaders ask their data sets for, in order, by the loader's sampler."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._of_iterator: WeakKeyDictionary[Any, Reading] = WeakKeyDictionary()
        self._last: Reading | None = None
        real: Any = vars(internals.BaseDataLoaderIter)["_next_index"]  # all loaders ask by it, even with workers

        def next_index(iterator: Any) -> Any:
            try:
                index = real(iterator)
            except StopIteration:
                if iterator in self._of_iterator:
                    self._of_iterator[iterator].is_whole = True
                raise
            numbers = index if isinstance(index, list) else [index]
            with suppress(TypeError):  # of what is no whole number; those of NumPy and torch are some
                batch = [*map(operator.index, numbers)]
                self._reading(iterator).batches.append(batch)
            return index

        self._replaced = patch.object(internals.BaseDataLoaderIter, "_next_index", next_index)
        self._replaced.start()

    def _reading(self, iterator: Any) -> Reading:
        found = self._of_iterator.get(iterator)
        if found is None or found.is_whole:  # an iterator with persistent workers goes on to the next epoch
            found = self._of_iterator[iterator] = Reading(iterator._index_sampler, iterator._dataset)
            self.readings.append(found)
        self._last = found
        return found

    def close(self) -> None:
        self._replaced.stop()

    def trains(self) -> None:
        """Note that the reading of the last batch is for training."""
        if self._last is not None:
            self._last.trains = True

    def reading(self, loader: DataLoader[Any]) -> Reading:
        """All that `loader` has read since `forget`; its workers are asked for more than is trained."""
        found = Reading(loader._index_sampler, loader.dataset)
        found.batches = [b for one in self.readings if one.loader_sampler is found.loader_sampler for b in one.batches]
        return found

    def forget_all(self) -> None:
        self.readings.clear()
        self._of_iterator.clear()

    def forget(self, loader: DataLoader[Any]) -> None:
        self.readings = [one for one in self.readings if one.loader_sampler is not loader._index_sampler]
        self._of_iterator.clear()


def judge_epoch(
    report: Report, of_ranks: Sequence[Pass], *, before: Sequence[int], is_order_of_epoch_0: bool = False
) -> None:
    """Judge the samples that ranks have read in an epoch; `before` are those of rank 0 in the epoch before."""
    own, num_ranks = of_ranks[0], len(of_ranks)
    is_apart = _are_apart(of_ranks)
    samples = [[(rank * is_apart, number) for number in each.samples] for rank, each in enumerate(of_ranks)]
    times = Counter(sample for each in samples for sample in each)
    subsets = {frozenset(each.subset) for each in of_ranks}
    size = sum(each.size for each in of_ranks) if is_apart else len(frozenset().union(*subsets)) or own.size
    num_samples = size or len(times)
    shared = _num_shared(samples)
    repeated, left_out = sum(times.values()) - len(times), num_samples - len(times)
    if num_ranks > 1 and shared >= len(times) / 2:
        _found(report, f"{shared} of {len(times)} samples", "are read by several ranks, each of which needs its own")
    elif len(subsets) > 1 and (several := sum(map(len, subsets)) - num_samples):
        _found(report, f"{several} of {num_samples} samples", "are in the subsets of some ranks and not of others")
    elif own.is_divided and repeated >= num_ranks and left_out:
        _found(report, f"{repeated} samples", f"are read again and {left_out} left out: ranks share unlike orders")
    elif repeated:
        report.note(f"{repeated} of {len(times)} samples are used again: padding, or a sampler's choice")
    if left_out:
        report.note(f"{left_out} of {num_samples} samples are left out")
    if before and own.samples == [*before]:
        if own.samples == sorted(before):
            report.note("the data are not shuffled")
        elif own.is_drawn:
            _found(report, "the order", "is that of the epoch before: call set_epoch on the sampler")
    elif is_order_of_epoch_0:
        _found(report, "the order", "is that of epoch 0: the sampler was asked for it before set_epoch was called")
    if len({len(each.samples) for each in of_ranks}) > 1:
        numbers = ", ".join(str(len(each.samples)) for each in of_ranks)
        report.note(f"ranks read {numbers} samples; the mean over ranks weighs the ranks alike")


def _are_apart(of_ranks: Sequence[Pass]) -> bool:
    """Whether each rank has a data set of its own, so that one number means different samples."""
    whole = [each for each in of_ranks if not each.subset]
    if len({each.size for each in whole}) > 1:
        return True
    read_alike = _num_shared([each.samples for each in whole]) >= len({n for each in whole for n in each.samples}) / 2
    return read_alike and len({each.checksum for each in whole}) > 1


def _num_shared(of_ranks: Sequence[Sequence[Any]]) -> int:
    """Number of samples that several ranks read."""
    readers = Counter(sample for samples in of_ranks for sample in {*samples})
    return sum(number > 1 for number in readers.values())


def is_order_of_epoch_0(loader: DataLoader[Any], ids: Sequence[int], epoch: int) -> bool:
    """Whether a later epoch was read in the first one's order, where the order follows from seed and epoch alone."""
    sampler: Any = copy.copy(loader.sampler)
    if epoch == 0 or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return False
    orders = []
    for number in (0, epoch):
        sampler.set_epoch(number)
        orders.append([*sampler][: len(ids)])
    return orders[0] == [*ids] != orders[1]


def judge_resumed_epoch(report: Report, ids: Sequence[int], before: Sequence[int] | None) -> None:
    """Judge whether rank 0 reads samples again that it had read before the checkpoint of this epoch."""
    report.counts["samples"] = len(ids)
    if before is None:
        report.note("the checkpoint was written without Replay: which samples came before it is not known")
    elif again := len({*ids} & {*before}):
        text = "that rank 0 read before the checkpoint are read again in the same epoch"
        if len({*before}) == len(before):
            _found(report, f"{again} of {len(before)} samples", text)
        else:
            report.note("samples are drawn with replacement: whether the order goes on is not known")


def judge_readings(report: Report, readings: Sequence[Reading]) -> None:
    """Judge passes of plain PyTorch over loaders that were trained whole. All ranks must call this."""
    own = [one for one in readings if one.trains and one.is_whole]
    datasets = [*{id(one.dataset): None for one in own}]
    before: dict[int, list[int]] = {}
    passes = gathered([(datasets.index(id(one.dataset)), one.pass_of()) for one in own])
    for number, epoch in enumerate(zip(*passes, strict=False)):
        of_ranks = [of_rank for _, of_rank in epoch]
        dataset = epoch[0][0]
        judged = replace(report, findings=[])
        judge_epoch(judged, of_ranks, before=before.get(dataset, []))
        before[dataset] = of_ranks[0].samples
        report.findings += [replace(finding, epoch=number) for finding in judged.findings]
    report.not_looked_at.append("evaluations, and whether a schedule makes a step in each epoch")
    if passes and not all(passes):
        report.not_looked_at.append("whole epochs, as no DataLoader was read to its end")


def _found(report: Report, what: str, text: str) -> None:
    report.findings.append(Finding("data", report.first_step, None, what, text))


class Epochs:
    """Judges the samples of the first two epochs, of one that is resumed in its middle, and the first evaluation."""

    def __init__(self, trainer: pl.Trainer, tell: Callable[[Report], None]) -> None:
        self.trainer, self._tell = trainer, tell
        self.resumed: Mapping[str, Any] = {}  # the `position` in the checkpoint that the training began with
        self.evaluation: Evaluation | None = None
        self._read = ReadIds()
        self._each = mode_of(trainer.strategy).model_parallel_size
        self._num_batches = self._batches_before = 0  # batches of this epoch, trained here and before the checkpoint
        self._before: list[int] = []  # samples that rank 0 read in the epoch before
        self._epochs_left, self._evaluations_left = 2, 1
        self._schedules: dict[LRScheduler, str] = {}  # the state of each at the beginning of this epoch
        self._has_noted_schedules = False

    def begin(self) -> None:
        self._note_idle_schedules()
        if self._num_batches:  # the iterator of the first epoch is there already
            self._read.forget_all()
        self._num_batches = 0

    def _note_idle_schedules(self) -> None:
        """Note schedules that made no step in the epoch before: manual optimization must step them itself."""
        before, configs = self._schedules, self.trainer.lr_scheduler_configs
        due = [config.scheduler for config in configs if config.frequency == 1 and not config.reduce_on_plateau]
        self._schedules = {one: repr(one.state_dict()) for one in due if isinstance(one, LRScheduler)}
        was_whole = 0 < self._num_batches == self.trainer.num_training_batches
        idle = [one for one, state in self._schedules.items() if was_whole and before.get(one) == state]
        if idle and not self._has_noted_schedules:
            self._has_noted_schedules = True
            report = empty_report(self.trainer, f"schedules of epoch {self.trainer.current_epoch - 1}")
            report.counts["states"] = len(self._schedules)
            report.note(f"{type(idle[0]).__name__} made no step in a whole epoch")
            self._tell(report)

    def batch_ended(self, batch_idx: int) -> None:
        self._num_batches += 1
        self._batches_before = batch_idx + 1 - self._num_batches

    def position(self) -> dict[str, Any]:
        """The samples that this process has used in the present epoch, for a checkpoint."""
        loader = self.trainer.train_dataloader
        own = self._read.reading(loader).samples(self._num_batches) if isinstance(loader, DataLoader) else []
        earlier = self.resumed["ids"].tolist() if self._batches_before and self.resumed else []
        return {"ids": torch.tensor(earlier + own, dtype=torch.int32)}

    def end(self) -> None:
        loader = self.trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            return
        reading, before = self._read.reading(loader), self._before
        self._before = ids = reading.samples(self._num_batches)
        is_whole = self._num_batches == sized_len(loader)  # a stream has no length
        if self._batches_before and ids:
            self._end_resumed(ids)
        elif ids and self._epochs_left and is_whole:
            self._epochs_left -= 1
            of_ranks = gathered(reading.pass_of(self._num_batches))[:: self._each]
            report = empty_report(self.trainer, f"data of epoch {self.trainer.current_epoch}")
            if of_ranks:
                report.counts["samples"] = len({sample for of_rank in of_ranks for sample in of_rank.samples})
                if type(loader.sampler).__name__ == "DistributedSamplerWrapper" and vars(loader.sampler)["shuffle"]:
                    report.note("Lightning shuffles the order of your sampler: pass use_distributed_sampler=False")
                first = is_order_of_epoch_0(loader, ids, self.trainer.current_epoch)
                judge_epoch(report, of_ranks, before=before, is_order_of_epoch_0=first)
            self._tell(self.trainer.strategy.broadcast(report))

    def _end_resumed(self, ids: Sequence[int]) -> None:
        subject = f"data of epoch {self.trainer.current_epoch}, resumed at batch {self._batches_before}"
        report = empty_report(self.trainer, subject)
        judge_resumed_epoch(report, ids, self.resumed["ids"].tolist() if self.resumed else None)
        self._tell(self.trainer.strategy.broadcast(report))

    def begin_evaluation(self) -> None:
        if self._evaluations_left and not self.trainer.sanity_checking:
            self._evaluations_left -= 1
            self.evaluation = Evaluation(self.trainer.lightning_module)

    def begin_batch(self, batch: Any, *_: Any) -> None:
        if self.evaluation is not None:
            self.evaluation.batch = batch

    def evaluated(self) -> list[int]:
        """The samples that this process has read for evaluations since the last call."""
        if (loader := self._val_loader()) is None:
            return []
        ids = self._read.reading(loader).samples()
        self._read.forget(loader)
        return ids

    def _val_loader(self) -> DataLoader[Any] | None:
        loaders = self.trainer.val_dataloaders
        one = loaders[0] if isinstance(loaders, list) and len(loaders) == 1 else loaders
        has_batches = isinstance(one, DataLoader) and one.batch_sampler is not None  # else a number is a whole batch
        return one if has_batches else None

    def _offered(self) -> int:
        """Number of samples of an evaluation's sampler; 0 if not all are asked for, or it makes batches itself."""
        loader = self._val_loader()
        if loader is None or type(loader.batch_sampler) is not BatchSampler:
            return 0
        if self.trainer.num_val_batches != [sized_len(loader)]:  # limit_val_batches, or no length
            return 0
        sampler: Any = loader.sampler
        return len(cast(Any, sampler.dataset) if isinstance(sampler, DistributedSampler) else sampler)

    def end_evaluation(self) -> None:
        if self.evaluation is None:
            self.evaluated()  # their numbers would be kept
            return
        evaluation, self.evaluation = self.evaluation, None
        evaluation.close()
        read = gathered(self.evaluated())[:: self._each]
        of_ranks = gathered(evaluation.seen())[:: self._each]
        report = empty_report(self.trainer, f"evaluation after step {self.trainer.global_step}")
        if of_ranks:
            judge_evaluation(report, of_ranks, self.trainer.callback_metrics, read, self._offered())
        report = self.trainer.strategy.broadcast(report)
        if report.counts["metrics"] or report.notes or report.not_looked_at:
            self._tell(report)

    def close(self) -> None:
        self._read.close()
        if self.evaluation is not None:
            self.evaluation.close()
