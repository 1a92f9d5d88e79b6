"""What a run computed, step by step, written by a callback that every mode runs with."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.data.images import Batch
from lit_cifar.models.ghost_batchnorm import GhostBatchNorm2d
from lit_cifar.tools.verify.evaluation import LogitsOfAll
from lit_cifar.tools.verify.rank_state import State, metrics_state, module_state, own_state, pieces_of

Order = Literal["usual", "reversed", "plain_kernels"]


class Trace(L.Callback):
    """Writes down what every process holds after every optimizer step and in every evaluation.

    It only reads: nothing is gathered from other processes, and nothing is written into a tensor, as that could put
    right what a strategy does wrong. Process `r` writes `step<k>-<r>.pt` (its loss, and its pieces of all tensors, see
    `pieces_of`), `evaluation<k>-<r>.pt` (ids, labels and logits, of the weights after step k), `samples<r>.jsonl` (the
    ids of each step, epoch and evaluation, and how many samples its metrics have counted) and `own<r>.jsonl` (digests
    of what it holds, see `rank_state`). Rank 0 writes `run.json` at the end.

    `order` changes the rounding of sums alone: "reversed" turns the samples round inside every chunk that is normalised
    by itself; "plain_kernels" uses torch's own convolutions in place of oneDNN's or cuDNN's.
    """

    def __init__(self, folder: str, *, order: Order = "usual") -> None:
        self.folder = Path(folder)
        self.order = order
        self._step = 0
        self._loss: Tensor | float = 0.0
        self._ids: dict[str, list[int]] = {"step": [], "epoch": [], "evaluation": []}
        self._parts: list[tuple[int, float]] = []  # of the step's batch: number of samples, and weight in the mean
        self._logits = LogitsOfAll()
        self._one_model = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Choose the kernels."""
        # TF32 has 10 bits: the plain kernels do not, and the tolerance would be the distance between the two.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = True  # processes of `tp` that compute the same must get the same bits
        if self.order == "plain_kernels":
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property in a module
            torch.backends.cudnn.enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin where a resumed run begins."""
        self._step = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        for period in ("step", "epoch"):
            self._ids[period] += batch.ids.tolist()
        self._parts.append((len(batch.ids), batch.weight))
        if self.order == "reversed":
            _reverse_chunks(batch, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Add to the loss, and after the last accumulation step write everything down."""
        self._loss = self._loss + outputs["loss"].detach()
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._one_model = False
        self._write_own(trainer, f"step {self._step}", self._own_state(trainer, pl_module))
        self._write_samples(trainer, "step", f"step {self._step}")
        self._parts = []
        step = {"dp_rank": BatchSplit.of(trainer.strategy).dp_rank, "loss": float(self._loss)}
        self._save(trainer, "step", step | {"pieces": pieces_of(trainer, pl_module)})
        self._loss = 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write_samples(trainer, "epoch", f"epoch {trainer.current_epoch}", counted=_counted(pl_module, "train"))

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int, *_: Any
    ) -> None:
        """Write down logits, and after the first batch what has computed them."""
        self._ids["evaluation"] += batch.ids.tolist()
        self._logits.add(outputs, batch)
        if batch_idx == 0:
            self._one_model = True
            self._write_own(trainer, f"{self._evaluation}, first batch", self._own_state(trainer, pl_module), same=True)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down the samples of this process, how many its metrics have counted, and what it has evaluated."""
        self._write_samples(trainer, "evaluation", self._evaluation, counted=_counted(pl_module, "val"))
        self._write_own(trainer, self._evaluation, self._own_state(trainer, pl_module), same=True)
        self._save(trainer, "evaluation", self._logits.take())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down what kind of run it was; the rest when all other callbacks have had their turn."""
        teardown = trainer.strategy.teardown

        def written_before_and_after() -> None:
            own = self._own_state(trainer, pl_module) | metrics_state(trainer.callback_metrics)
            self._write_own(trainer, "end", own, same=True)
            teardown()
            replica = "" if self._one_model else f"replica {BatchSplit.of(trainer.strategy).dp_rank}"
            self._write_own(trainer, "whole network", module_state(pl_module, replica=replica))

        trainer.strategy.teardown = written_before_and_after  # type: ignore[method-assign]
        if trainer.is_global_zero:
            chunks = BatchSplit.of(trainer.strategy).ghost_batches(accumulation=trainer.accumulate_grad_batches)
            content = {"world_size": trainer.world_size, "chunks": asdict(chunks)}
            (self.folder / "run.json").write_text(json.dumps(content))

    @property
    def _evaluation(self) -> str:
        return f"evaluation after step {self._step}"

    def _own_state(self, trainer: L.Trainer, pl_module: L.LightningModule) -> State:
        return own_state(trainer, pl_module, one_model=self._one_model)

    def _write_own(self, trainer: L.Trainer, when: str, state: State, *, same: bool = False) -> None:
        same_as = f"step {self._step}" if same else None
        line = {"when": when, "rank": trainer.global_rank, "same_as": same_as, "state": state}
        self._append(f"own{trainer.global_rank}.jsonl", line)

    def _write_samples(
        self, trainer: L.Trainer, period: str, when: str, *, counted: dict[str, int] | None = None
    ) -> None:
        dp_rank = BatchSplit.of(trainer.strategy).dp_rank
        line = {"when": when, "rank": trainer.global_rank, "dp_rank": dp_rank, "ids": self._ids[period]}
        line |= {"counted": counted or {}, "parts": self._parts if period == "step" else []}
        self._append(f"samples{trainer.global_rank}.jsonl", line)
        self._ids[period] = []

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _save(self, trainer: L.Trainer, what: str, content: dict[str, Any]) -> None:
        torch.save(content, self.folder / f"{what}{self._step}-{trainer.global_rank}.pt")


def counted(metrics: torch.nn.Module) -> dict[str, int]:
    """How many samples each metric among `metrics` has counted in this process since it was reset."""
    found: dict[str, int] = {}
    for name, metric in metrics.named_modules():
        state: Any = metric.metric_state if isinstance(metric, Metric) else {}
        if isinstance(metric, MeanMetric):
            found[name] = round(float(state["weight"]))
        elif "confmat" in state:
            found[name] = int(state["confmat"].sum())
        elif "tp" in state:  # what is right, and what another class was taken for
            found[name] = int(state["tp"].sum() + state["fn"].sum())
    return found


def _counted(module: torch.nn.Module, split: str) -> dict[str, int]:
    """How many samples the metrics of a split have counted in this process; those of training have no common name."""
    found = counted(module)
    evaluation = {name: count for name, count in found.items() if name.startswith(("val_", "test_"))}
    if split == "train":
        return {name: count for name, count in found.items() if name not in evaluation}
    return {name: count for name, count in evaluation.items() if name.startswith(f"{split}_")}


def _reverse_chunks(batch: Batch, pl_module: Any) -> None:
    """Reverse the samples inside each chunk of the batch, in place."""
    layers = (layer for layer in pl_module.modules() if isinstance(layer, GhostBatchNorm2d))
    chunks = next((layer.chunks for layer in layers), None)
    num_samples = len(batch.ids)
    positions = torch.arange(num_samples)
    groups = (
        [positions] if chunks is None else [chunk for replica in chunks.positions(num_samples) for chunk in replica]
    )
    for group in groups:
        group = group.to(batch.ids.device)
        for tensor in (batch.images, batch.labels, batch.ids):
            tensor[group] = tensor[group.flip(0)]
