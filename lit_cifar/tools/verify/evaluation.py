"""What an evaluation has computed for each sample, compared with one device that has the same weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.strategies.modes import SILENT
from lit_cifar.tools.verify.comparison import (
    EXACT_BOUND,
    FLOOR_ULP,
    LOGITS,
    METRIC_BOUND,
    NOISE_FACTOR,
    Bounds,
    Step,
    and_more,
)
from lit_cifar.tools.verify.configuration import module_of, precision_of
from lit_cifar.tools.verify.rank_state import filled
from lit_cifar.tools.verify.runs import quiet

# In which precision one device evaluates once more, to measure what rounding does.
_WIDER = {"32-true": "64-true", "bf16-mixed": "32-true"}


@dataclass(frozen=True)
class Evaluated:
    """What a process has computed in an evaluation; the samples in the order in which it has read them."""

    ids: Tensor  # int64, (n,)
    labels: Tensor  # int64, (n,)
    logits: Tensor  # (n, num_classes)
    sizes: Tensor | None = None  # int64, how many of them each batch had

    def of_replicas(self, count: int) -> list[tuple[int, int]]:
        """Right and seen samples of each replica among which every batch is divided by `Tensor.chunk`, as in `dp`."""
        assert self.sizes is not None
        right = torch.split(self.logits.argmax(dim=1) == self.labels, self.sizes.tolist())
        found = [[0, 0] for _ in range(count)]
        for batch in right:
            for own, chunk in zip(found, batch.chunk(count), strict=False):  # a small batch has fewer chunks
                own[0] += int(chunk.sum())
                own[1] += len(chunk)
        return [(own[0], own[1]) for own in found]

    @property
    def counts(self) -> tuple[int, int]:
        """Right and seen samples."""
        return int((self.logits.argmax(dim=1) == self.labels).sum()), len(self.ids)

    def gaps(self, wanted: "Evaluated") -> list[tuple[int, float]]:
        """Each sample with its largest |logit - wanted| over max(1, largest |wanted|); infinite if not finite.

        With another label it is infinite, too. Samples that `wanted` has not are left out: their ids say so.
        """
        place = {sample: row for row, sample in enumerate(wanted.ids.tolist())}
        rows = [row for row, sample in enumerate(self.ids.tolist()) if sample in place]
        others = [place[sample] for sample in self.ids[rows].tolist()]
        gaps = (self.logits[rows].double() - wanted.logits[others].double()).abs().amax(dim=1)
        gaps = gaps / wanted.logits.double().abs().max().clamp(min=1.0)
        gaps[~gaps.isfinite() | (self.labels[rows] != wanted.labels[others])] = torch.inf
        return list(zip(self.ids[rows].tolist(), gaps.tolist(), strict=True))


class LogitsOfAll:
    """Collects what the batches of an evaluation have given."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._batches.append((batch.ids.cpu(), batch.labels.cpu(), logits.detach().cpu().clone()))

    def take(self) -> dict[str, Tensor]:
        """The arguments of `Evaluated`; the next evaluation begins."""
        ids, labels, logits = (torch.cat(column) for column in zip(*self._batches, strict=True))
        sizes = torch.tensor([len(batch[0]) for batch in self._batches])
        self._batches = []
        return {"ids": ids, "labels": labels, "logits": logits, "sizes": sizes}


class _Collects(L.Callback):
    def __init__(self) -> None:
        self.logits = LogitsOfAll()

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, *_: Any
    ) -> None:
        self.logits.add(outputs, batch)


@dataclass(frozen=True)
class Expected:
    """An evaluation by one device, and how far another one with the same weights may be from it."""

    evaluated: Evaluated
    metrics: dict[str, float]  # by the names under which they are logged
    bounds: Bounds  # of the logits, and of the metrics by their names


def expected(step: Step, *, config: Mapping[str, Any]) -> Expected:
    """The validation of one device with the weights of `step`.

    What may differ is 1e-9 in float64; else it is measured, by the same evaluation in the next wider precision.
    """
    evaluated, metrics = _evaluated_alone(step, config=config)
    logits, bounds = EXACT_BOUND, dict.fromkeys(metrics, METRIC_BOUND)
    if (wider := _WIDER.get(precision_of(config))) is not None:
        wide, wide_metrics = _evaluated_alone(step, config=config, precision=wider)
        logits = max(
            FLOOR_ULP * torch.finfo(torch.float32).eps, NOISE_FACTOR * max(gap for _, gap in evaluated.gaps(wide))
        )
        turned = max(2, round(NOISE_FACTOR * abs(wide.counts[0] - evaluated.counts[0]))) / len(wide.ids)
        if wider == "32-true":
            bounds = {name: max(turned, NOISE_FACTOR * abs(wide_metrics[name] - metrics[name])) for name in metrics}
    return Expected(evaluated, metrics, {LOGITS: logits} | bounds)


def _evaluated_alone(
    step: Step, *, config: Mapping[str, Any], precision: str | None = None
) -> tuple[Evaluated, dict[str, float]]:
    """In the configuration's precision or another."""
    model = config["model"]
    module = module_of(config, label_smoothing=model["label_smoothing"], flip_test=model["flip_test"])
    filled(module.network, step)
    callback = _Collects()
    settings = SILENT | {name: config["trainer"][name] for name in ("accelerator", "limit_val_batches")}
    settings["precision"] = precision or precision_of(config)
    with quiet(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # as `Trace`
        trainer = L.Trainer(devices=1, callbacks=[callback], **settings)
        trainer.validate(module, CIFAR10DataModule(**config["data"]), verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Evaluated(**callback.logits.take()), metrics


def logits_problems(when: str, rank: int, gaps: Sequence[tuple[int, float]], *, bound: float) -> list[str]:
    """The first sample of process `rank` whose logits, or label, are not those of one device, and how many more."""
    wrong = [(sample, gap) for sample, gap in gaps if not gap <= bound]
    return [
        f"{when}: logits of sample {sample} of process {rank} differ by {gap:.1e}, allowed {bound:.1e}"
        + and_more(len(wrong) - 1)
        for sample, gap in wrong[:1]
    ]
