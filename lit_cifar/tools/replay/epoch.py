"""Findings about epochs: which samples the ranks read, and whether a logged metric is that of the whole set."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lit_cifar.tools.replay.lightning_view import empty_report, num_together
from lit_cifar.tools.replay.reduction import gamma
from lit_cifar.tools.replay.replicas import gathered
from lit_cifar.tools.replay.verdict import Finding, Report


class ReadIds:
    """Which samples the loaders of this process ask their data sets for, by the loader's sampler, in their order."""

    def __init__(self) -> None:
        self._ids: dict[int, list[list[int]]] = {}  # batch by batch, by the sampler that makes them
        self._real: Any = vars(_BaseDataLoaderIter)["_next_index"]  # all loaders ask by it, also those with workers
        ids, real = self._ids, self._real

        def next_index(iterator: Any) -> Any:
            index = real(iterator)
            its = index if isinstance(index, list) else [index]
            if all(isinstance(number, int) for number in its):
                ids.setdefault(id(iterator._index_sampler), []).append(its)
            return index

        self._observed = next_index
        _BaseDataLoaderIter._next_index = next_index  # type: ignore[method-assign]

    def close(self) -> None:
        if vars(_BaseDataLoaderIter)["_next_index"] is self._observed:
            _BaseDataLoaderIter._next_index = self._real  # type: ignore[method-assign]

    def of(self, loader: DataLoader[Any], num_batches: int | None = None) -> list[int]:
        """Those of the first batches since they were forgotten; processes of a loader are asked for more than these."""
        batches = self._ids.get(id(loader._index_sampler), [])[:num_batches]
        return [sample for batch in batches for sample in batch]

    def forget(self, loader: DataLoader[Any]) -> None:
        self._ids.pop(id(loader._index_sampler), None)


def judge_epoch(
    report: Report,
    of_ranks: Sequence[Sequence[int]],
    *,
    num_samples: int,
    before: Sequence[int],
    is_order_of_epoch_0: bool = False,
) -> None:
    """What is wrong with the samples that ranks have read in an epoch; `before`: those of rank 0 in the last one."""
    times = Counter(sample for ids in of_ranks for sample in ids)
    readers = Counter(sample for ids in of_ranks for sample in set(ids))
    shared = sum(number > 1 for number in readers.values())
    repeated, left_out = sum(times.values()) - len(times), num_samples - len(times)
    report.counts["samples"] = len(times)
    if len(of_ranks) > 1 and shared >= len(times) / 2:
        _found(report, f"{shared} of {len(times)} samples", "are read by several ranks, each of which needs its own")
    elif repeated:
        report.notes.append(f"{repeated} of {len(times)} samples are used again: padding, or a sampler's choice")
    if left_out:
        report.notes.append(f"{left_out} of {num_samples} samples are left out")
    if before and [*of_ranks[0]] == [*before]:
        if [*before] == sorted(before):
            report.notes.append("the data are not shuffled")
        else:
            _found(report, "the order", "is that of the epoch before: call set_epoch on the sampler")
    elif is_order_of_epoch_0:
        _found(report, "the order", "is that of epoch 0: the sampler was asked for it before set_epoch was called")
    if len({len(ids) for ids in of_ranks}) > 1:
        sizes = ", ".join(str(len(ids)) for ids in of_ranks)
        report.notes.append(f"ranks read {sizes} samples; the mean over ranks weighs the ranks alike")


def is_order_of_epoch_0(loader: DataLoader[Any], ids: Sequence[int], epoch: int) -> bool:
    """Whether a later epoch was read in the order of the first, where the sampler makes it of seed and epoch alone."""
    sampler: Any = copy.copy(loader.sampler)
    if epoch == 0 or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return False
    orders = []
    for number in (0, epoch):
        sampler.set_epoch(number)
        orders.append([*sampler][: len(ids)])
    return orders[0] == [*ids] != orders[1]


def judge_resumed_epoch(report: Report, ids: Sequence[int], before: Sequence[int] | None) -> None:
    """Whether rank 0 reads samples again that it had read when the checkpoint of this epoch was written."""
    report.counts["samples"] = len(ids)
    if before is None:
        report.notes.append("the checkpoint was written without Replay: which samples came before it is not known")
    elif again := len({*ids} & {*before}):
        text = "that rank 0 read before the checkpoint are read again in the same epoch"
        if len({*before}) == len(before):
            _found(report, f"{again} of {len(before)} samples", text)
        else:
            report.notes.append("samples are drawn with replacement: whether the order goes on is not known")


@dataclass
class Logged:
    """What this process has logged under a name in an evaluation, weighted by the sizes of its batches."""

    total: float = 0.0
    magnitude: float = 0.0
    num_samples: int = 0
    num_batches: int = 0

    def add(self, value: float, size: int) -> None:
        self.total += value * size
        self.magnitude += abs(value) * size
        self.num_samples += size
        self.num_batches += 1


@dataclass
class Evaluation:
    """The means that one evaluation logs."""

    module: pl.LightningModule
    logged: dict[str, Logged] = field(default_factory=dict)
    batch: Any = None  # that is being evaluated

    def __post_init__(self) -> None:
        self._own = vars(self.module).get("log")
        self.module.log = partial(self._log, self.module.log)  # type: ignore[method-assign]

    def close(self) -> None:
        del self.module.log
        if self._own is not None:
            self.module.log = self._own  # type: ignore[method-assign]

    def _log(self, log: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        plain = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if plain and self.batch is not None and kwargs.get("reduce_fx", "mean") in ("mean", torch.mean):
            size = kwargs.get("batch_size") or extract_batch_size(self.batch)
            self.logged.setdefault(name, Logged()).add(float(value), size)
        log(name, value, *args, **kwargs)


def judge_evaluation(
    report: Report,
    of_ranks: Sequence[dict[str, Logged]],
    metrics: Mapping[str, Any],
    read: Sequence[Sequence[int]],
) -> None:
    """Compare each logged mean with the mean over all samples of all ranks; `read`: ids of the samples by rank.

    The bound is that of its own sums in float32: each batch is added once, so is each rank.
    """
    for name in of_ranks[0]:
        its = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        if name not in metrics:
            continue
        num_samples = sum(one.num_samples for one in its)
        true, logged = sum(one.total for one in its) / num_samples, float(metrics[name])
        roundings = max(one.num_batches for one in its) + len(its) + 3
        bound = gamma(roundings, torch.float32) * sum(one.magnitude for one in its) / num_samples
        report.counts["samples"] = max(report.counts["samples"], num_samples)
        report.counts["metrics"] += 1
        if not abs(true - logged) <= bound:
            own = its[0].total / its[0].num_samples
            why = "ranks or batches of unequal size weigh alike"
            if abs(own - logged) <= bound:
                why = "it is that of rank 0's samples alone, pass sync_dist=True"
            text = f"is logged as {logged:.9g}, the mean over all {num_samples} samples is {true:.9g}: {why}"
            _found(report, name, text)
    distinct = {sample for ids in read for sample in ids}
    if repeated := sum(map(len, read)) - len(distinct):
        report.notes.append(f"{repeated} of {len(distinct)} samples are evaluated again: a sampler's padding")


def _found(report: Report, what: str, text: str) -> None:
    part: Any = "evaluation" if report.counts["metrics"] else "data"
    report.findings.append(Finding(part, report.first_step, None, what, text))


class Epochs:
    """What is seen of the first two epochs, of one that is resumed in its middle, and of the first evaluation."""

    def __init__(self, trainer: pl.Trainer, tell: Callable[[Report], None]) -> None:
        self.trainer, self._tell = trainer, tell
        self.resumed: Mapping[str, Any] = {}  # the `position` in the checkpoint that the training began with
        self.evaluation: Evaluation | None = None
        self._read = ReadIds()
        self._each = num_together(trainer.strategy)
        self._num_batches = self._batches_before = 0  # of this epoch: trained here, and before the checkpoint
        self._before: list[int] = []  # what rank 0 read in the epoch before
        self._epochs_left, self._evaluations_left = 2, 1

    def begin(self) -> None:
        loader = self.trainer.train_dataloader
        if self._num_batches and isinstance(loader, DataLoader):
            self._read.forget(loader)
        self._num_batches = 0

    def batch_ended(self, batch_idx: int) -> None:
        self._num_batches += 1
        self._batches_before = batch_idx + 1 - self._num_batches

    def position(self) -> dict[str, Any]:
        """Which samples this process has used in the epoch that is being trained."""
        loader = self.trainer.train_dataloader
        own = self._read.of(loader, self._num_batches) if isinstance(loader, DataLoader) else []
        earlier = self.resumed["ids"].tolist() if self._batches_before and self.resumed else []
        return {"ids": torch.tensor(earlier + own, dtype=torch.int32)}

    def end(self) -> None:
        loader = self.trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            return
        ids, before = self._read.of(loader, self._num_batches), self._before
        self._before = ids
        if self._batches_before and ids:
            self._end_resumed(ids)
        elif ids and self._epochs_left and self._num_batches == len(loader):  # no iterable data set, and trained whole
            self._epochs_left -= 1
            of_ranks = gathered(ids)[:: self._each]
            report = self._report(f"data of epoch {self.trainer.current_epoch}")
            if of_ranks:
                first = is_order_of_epoch_0(loader, ids, self.trainer.current_epoch)
                judge_epoch(
                    report,
                    of_ranks,
                    num_samples=len(loader.dataset),  # type: ignore[arg-type]
                    before=before,
                    is_order_of_epoch_0=first,
                )
            self._tell(self.trainer.strategy.broadcast(report))

    def _end_resumed(self, ids: Sequence[int]) -> None:
        report = self._report(f"data of epoch {self.trainer.current_epoch}, resumed at batch {self._batches_before}")
        judge_resumed_epoch(report, ids, self.resumed["ids"].tolist() if self.resumed else None)
        self._tell(self.trainer.strategy.broadcast(report))

    def begin_evaluation(self) -> None:
        if self._evaluations_left:
            self._evaluations_left -= 1
            self.evaluation = Evaluation(self.trainer.lightning_module)

    def evaluated(self) -> list[int]:
        """The samples that this process has read for evaluations since the last call."""
        loaders = self.trainer.val_dataloaders
        one = loaders[0] if isinstance(loaders, list) and len(loaders) == 1 else loaders
        if not isinstance(one, DataLoader):
            return []
        ids = self._read.of(one)
        self._read.forget(one)
        return ids

    def end_evaluation(self) -> None:
        if self.evaluation is None:
            return
        its, self.evaluation = self.evaluation, None
        its.close()
        read = gathered(self.evaluated())[:: self._each]
        of_ranks = gathered(its.logged)[:: self._each]
        report = self._report(f"evaluation after step {self.trainer.global_step}")
        if of_ranks:
            judge_evaluation(report, of_ranks, self.trainer.callback_metrics, read)
        report = self.trainer.strategy.broadcast(report)
        if report.counts["metrics"]:
            self._tell(report)

    def _report(self, subject: str) -> Report:
        report = empty_report(self.trainer)
        report.subject = subject
        return report

    def close(self) -> None:
        self._read.close()
        if self.evaluation is not None:
            self.evaluation.close()
