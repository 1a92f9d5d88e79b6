"""What an evaluation has computed for each sample, compared with one device that has the same weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.modes import SILENT
from lit_cifar.verify.comparison import EXACT_BOUND, FLOOR_ULP, LOGITS, NOISE_FACTOR, Bounds, Step, and_more
from lit_cifar.verify.configuration import module_of
from lit_cifar.verify.logged_metrics import METRIC_BOUND
from lit_cifar.verify.runs import quiet

# In which precision one device evaluates once more, to measure what rounding does.
_WIDER = {"32-true": "64-true", "bf16-mixed": "32-true"}


@dataclass(frozen=True)
class Evaluated:
    """What a process has computed in an evaluation; the samples in the order in which it has read them."""

    ids: Tensor  # int64, (n,)
    labels: Tensor  # int64, (n,)
    logits: Tensor  # (n, num_classes)

    @property
    def counts(self) -> tuple[int, int]:
        """Right and seen samples."""
        return int((self.logits.argmax(dim=1) == self.labels).sum()), len(self.ids)

    def like(self, other: "Evaluated") -> "Evaluated":
        """The samples of `other` that this one has, in the order of `other`."""
        place = {sample: row for row, sample in enumerate(self.ids.tolist())}
        rows = torch.tensor([place[sample] for sample in other.ids.tolist() if sample in place], dtype=torch.int64)
        return Evaluated(self.ids[rows], self.labels[rows], self.logits[rows])


class LogitsOfAll:
    """Collects what the batches of an evaluation have given."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor, batch: Batch) -> None:
        self._batches.append((batch.ids.cpu(), batch.labels.cpu(), logits.detach().cpu().clone()))

    def take(self) -> dict[str, Tensor]:
        """The arguments of `Evaluated`; the next evaluation begins."""
        ids, labels, logits = (torch.cat(column) for column in zip(*self._batches, strict=True))
        self._batches = []
        return {"ids": ids, "labels": labels, "logits": logits}


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
    if (wider := _WIDER.get(_precision(config))) is not None:
        wide, wide_metrics = _evaluated_alone(step, config=config, precision=wider)
        logits = max(FLOOR_ULP * torch.finfo(torch.float32).eps, NOISE_FACTOR * gaps(evaluated, wide).max().item())
        turned = max(2, round(NOISE_FACTOR * abs(wide.counts[0] - evaluated.counts[0]))) / len(wide.ids)
        if wider == "32-true":
            bounds = {name: max(turned, NOISE_FACTOR * abs(wide_metrics[name] - metrics[name])) for name in metrics}
    return Expected(evaluated, metrics, {LOGITS: logits} | bounds)


def _precision(config: Mapping[str, Any]) -> str:
    return str(config["trainer"]["precision"] or "32-true")


def _evaluated_alone(
    step: Step, *, config: Mapping[str, Any], precision: str | None = None
) -> tuple[Evaluated, dict[str, float]]:
    """In the configuration's precision or another."""
    model = config["model"]
    module = module_of(config, label_smoothing=model["label_smoothing"], flip_test=model["flip_test"])
    weights = {**step["parameters"], **step.get("buffers", {})}
    module.network.to(next(iter(weights.values())).dtype).load_state_dict(weights)
    callback = _Collects()
    settings = {name: config["trainer"][name] for name in ("accelerator", "precision", "limit_val_batches")}
    with quiet(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # as `Trace`
        settings |= SILENT if precision is None else SILENT | {"precision": precision}
        trainer = L.Trainer(devices=1, callbacks=[callback], **settings)
        trainer.validate(module, CIFAR10DataModule(**config["data"]), verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Evaluated(**callback.logits.take()), metrics


def gaps(found: Evaluated, wanted: Evaluated) -> Tensor:
    """Largest |found - wanted| of each sample over max(1, largest |wanted|); infinite where it is not finite."""
    a, b = found.logits.double(), wanted.logits.double()
    gap = (a - b).abs().amax(dim=1) / b.abs().max().clamp(min=1.0)
    return torch.where(gap.isfinite(), gap, torch.inf)


def logits_problems(when: str, rank: int, found: Evaluated, wanted: Evaluated, *, bound: float) -> list[str]:
    """The first sample of process `rank` whose label or logits are not those of one device, and how many more."""
    wanted = wanted.like(found)
    found = found.like(wanted)  # foreign samples are reported by their ids
    gap = gaps(found, wanted)
    wrong = [sample for sample, of_it in zip(found.ids.tolist(), gap.tolist(), strict=True) if not of_it <= bound]
    labels = found.ids[found.labels != wanted.labels].tolist()
    problems = [
        f"{when}: sample {s} of process {rank} has another label" + and_more(len(labels) - 1) for s in labels[:1]
    ]
    return problems + [
        f"{when}: logits of sample {sample} of process {rank} differ by {gap[found.ids == sample].max():.1e}, allowed "
        f"{bound:.1e}" + and_more(len(wrong) - 1)
        for sample in wrong[:1]
    ]
