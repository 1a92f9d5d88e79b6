"""Metrics of training and evaluation: integer counts on the device, for which the host never waits.

torchmetrics' own updates count with `torch.bincount`, which reads the largest number of its argument, or with vectors
of zeros and ones, some dozens of operators. Results here are the same. No state has the size of all pairs of classes.
"""

from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat

STEP_METRICS = ("train/loss_step", "train/acc_step")  # of each process's own part of a batch


class MeanLoss(Metric):
    """Mean of the losses of all samples, the same for any order in which they are added.

    Each is rounded to a multiple of 2**-32. Their sum is exact in float64 while it is below 2**21.
    """

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor) -> None:
        """Count a batch; `losses` float, (n,)."""
        self.total.add_((losses.double() * 2.0**32).round_().sum())
        self.count.add_(len(losses))

    def compute(self) -> Tensor:
        return (self.total * 2.0**-32 / self.count).to(torch.get_default_dtype())


class TopAccuracy(MulticlassAccuracy):
    """Share of the samples whose class is among the `top_k` most probable; it counts into `tp` and `fn` alone.

    So "macro" is the mean over the classes that have samples: torchmetrics' also has classes that are only predicted.
    """

    tp: Tensor  # int64, a number for each class, or one for all
    fn: Tensor

    def __init__(self, num_classes: int, *, top_k: int = 1, average: Literal["micro", "macro"] = "micro") -> None:
        super().__init__(num_classes, average=average, top_k=top_k)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count a batch; `preds` (n, C), `target` int64, (n,)."""
        if self.top_k == 1:
            found = preds.argmax(dim=1) == target
        else:
            found = (preds.topk(self.top_k, dim=1).indices == target[:, None]).any(dim=1)
        if self.top_k == 1 and self.average == "micro":
            right = found.sum()
            self.tp.add_(right)
            self.fn.add_(len(target) - right)
        else:  # torchmetrics would count each class separately
            self.tp.index_add_(0, target, found.to(self.tp))
            self.fn.index_add_(0, target, found.logical_not().to(self.fn))


class ConfusionMatrix(Metric):
    """How many samples of each class were taken for each: it holds a number for each sample, not for each pair."""

    cells: list[Tensor]  # int64, of a batch each: true class times C, plus predicted class

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("cells", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Keep a batch; `preds` (n, C), `target` int64, (n,); n may be 0.

        A process that has kept no batch at all would send torchmetrics' empty float32 tensor to the others.
        """
        self.cells.append(target * self.num_classes + preds.argmax(dim=1))

    def compute(self) -> Tensor:
        """True class, predicted class, number of samples: int64, (K, 3), in order, of the pairs that have samples."""
        cells, counts = torch.unique(dim_zero_cat(self.cells), return_counts=True)
        return torch.stack([cells // self.num_classes, cells % self.num_classes, counts], dim=1)


class EvaluationMetrics(nn.Module):
    """The metrics of one evaluation split; counts are integers, so that their sum over processes is exact."""

    def __init__(self, split: Literal["val", "test"], num_classes: int) -> None:
        super().__init__()
        self.split = split
        self.loss = MeanLoss()
        scores: dict[str, Metric | MetricCollection] = {"acc": TopAccuracy(num_classes)}
        scores["acc_top5"] = TopAccuracy(num_classes, top_k=min(5, num_classes))
        scores["acc_balanced"] = TopAccuracy(num_classes, average="macro")  # a rare class counts as much as another
        # torchmetrics would read the counts to find out which metrics share them.
        self.scores = MetricCollection(scores, prefix=f"{split}/", compute_groups=False)
        self.confusion = ConfusionMatrix(num_classes)

    def update(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        """Count a batch; `logits` (n, C), `labels` (n,), `losses` (n,). In an empty one there is nothing to count."""
        self.confusion.update(logits, labels)
        if not len(labels):
            return
        self.loss.update(losses)
        self.scores.update(logits, labels)


class EpochMeans(Callback):
    """Lets all processes compute the means of an epoch together, before a hook of one alone asks for them.

    A rank that computes alone waits for the others for ever. Lightning's progress bars ask on rank 0.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _ = trainer.callback_metrics

    on_validation_epoch_end = on_test_epoch_end = on_train_epoch_end
