"""What a run computed, step by step, written by a callback that every mode runs with."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from lit_cifar.batch_split import BatchSplit
from lit_cifar.checkpoint.format import strip_prefix
from lit_cifar.data.images import Batch
from lit_cifar.models.ghost_batchnorm import GhostBatchNorm2d
from lit_cifar.reporting.per_rank import PerRankAccuracy
from lit_cifar.verify.logged_metrics import counted
from lit_cifar.verify.planting import Site, plant
from lit_cifar.verify.rank_state import State, metrics_state, module_state, own_state

Order = Literal["usual", "reversed", "plain_kernels"]


class Trace(L.Callback):
    """Records losses, weights, optimizer state and samples after every optimizer step, and the evaluation's counts.

    Collects through the strategy's own methods, as a checkpoint is collected, so it knows no mode. Rank 0 writes
    `step<k>.pt` (loss of the global batch, the whole network's state, the whole optimizer state) and `run.json` (number
    of processes, chunks that are normalised by themselves, counts of the evaluation). Process `r` writes
    `samples<r>.jsonl` (the ids of each step, epoch and evaluation, and how many samples its metrics have counted) and
    `own<r>.jsonl` (digests of what it holds, see `rank_state`).

    After step `reload_after`, if not 0, weights, buffers, optimizer and schedule are wiped and read back from a
    checkpoint, as a run that is resumed does. `order` changes the rounding of sums alone: "reversed" turns the samples
    round inside every chunk that is normalised by itself; "plain_kernels" uses torch's own convolutions in place of
    oneDNN's or cuDNN's. `bug` is the path of a mistake to make, "package.module:name".
    """

    def __init__(self, folder: str, *, reload_after: int = 0, order: Order = "usual", bug: str | None = None) -> None:
        self.folder = Path(folder)
        self.reload_after = reload_after
        self.order = order
        self.bug = bug
        self._step = 0
        self._loss: Tensor | float = 0.0
        self._ids: dict[str, list[int]] = {"step": [], "epoch": [], "evaluation": []}
        self._schedules: list[dict[str, Any]] = []
        self._one_model = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before the strategy has touched the network: plant the bug, choose the kernels."""
        # TF32 has 10 bits: the plain kernels do not, and the tolerance would be the distance between the two.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = True  # processes of `tp` that compute the same must get the same bits
        if self.bug is not None:
            plant(self.bug, Site(trainer, pl_module, self.folder))
        if self.order == "plain_kernels":
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property in a module
            torch.backends.cudnn.enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._schedules = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        for period in ("step", "epoch"):
            self._ids[period] += batch.ids.tolist()
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
        when = f"step {self._step}"
        # Before anything is collected: some strategies then overwrite what other replicas have.
        self._write_own(trainer, when, own_state(trainer, pl_module, one_model=False))
        self._write_samples(trainer, "step", when)
        self._write_step(trainer, pl_module)
        self._loss = 0.0
        if self._step == self.reload_after:
            reload_state(trainer, pl_module, self.folder / "reload.ckpt", schedules=self._schedules)
            self._one_model = True
            self._write_own(trainer, f"{when}, loaded back", self._own_state(trainer, pl_module), same_as=when)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write_samples(trainer, "epoch", f"epoch {trainer.current_epoch}", counted=_counted(pl_module, "train"))

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, *_: Any, **__: Any
    ) -> None:
        self._ids["evaluation"] += batch.ids.tolist()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down the samples of this process, how many its metrics have counted, and what it has evaluated."""
        self._write_samples(trainer, "evaluation", "evaluation", counted=_counted(pl_module, "val"))
        self._one_model = True
        self._write_own(trainer, "evaluation", self._own_state(trainer, pl_module), same_as=f"step {self._step}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down the counts, and what kind of run it was; the rest when all other callbacks have had their turn."""
        teardown = trainer.strategy.teardown

        def written_before_and_after() -> None:
            own = self._own_state(trainer, pl_module) | metrics_state(trainer.callback_metrics)
            self._write_own(trainer, "end", own, same_as=f"step {self._step}")
            teardown()
            replica = "" if self._one_model else f"replica {BatchSplit.of(trainer.strategy).dp_rank}"
            self._write_own(trainer, "whole network", module_state(pl_module, replica=replica))

        trainer.strategy.teardown = written_before_and_after  # type: ignore[method-assign]
        if not trainer.is_global_zero:
            return
        batch_split = BatchSplit.of(trainer.strategy)
        counts = next((c.counts for c in trainer.callbacks if isinstance(c, PerRankAccuracy)), {})  # type: ignore[attr-defined]
        content = {
            "world_size": trainer.world_size,
            "chunks": asdict(batch_split.ghost_batches(accumulation=trainer.accumulate_grad_batches)),
            "counts": [(count.correct, count.total) for count in counts.get("val", [])],
        }
        (self.folder / "run.json").write_text(json.dumps(content))

    def _own_state(self, trainer: L.Trainer, pl_module: L.LightningModule) -> State:
        return own_state(trainer, pl_module, one_model=self._one_model)

    def _write_own(self, trainer: L.Trainer, when: str, state: State, *, same_as: str | None = None) -> None:
        line = {"when": when, "rank": trainer.global_rank, "same_as": same_as, "state": state}
        self._append(f"own{trainer.global_rank}.jsonl", line)

    def _write_samples(
        self, trainer: L.Trainer, period: str, when: str, *, counted: dict[str, int] | None = None
    ) -> None:
        line = {"when": when, "dp_rank": BatchSplit.of(trainer.strategy).dp_rank, "ids": self._ids[period]}
        self._append(f"samples{trainer.global_rank}.jsonl", line | {"counted": counted or {}})
        self._ids[period] = []

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _write_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Every process takes part in these, whether or not it writes.
        loss = trainer.strategy.reduce(self._loss, reduce_op="mean")
        state = trainer.strategy.lightning_module_state_dict()
        optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
        if trainer.is_global_zero:
            step = {
                "loss": loss,
                "state": strip_prefix(state),
                "buffers": [name.removeprefix("network.") for name, _ in pl_module.named_buffers()],
                "optimizer": optimizer,
            }
            torch.save(step, self.folder / f"step{self._step}.pt")


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


@torch.no_grad()
def reload_state(
    trainer: L.Trainer, pl_module: L.LightningModule, path: Path, *, schedules: Sequence[dict[str, Any]]
) -> None:
    """Save a checkpoint, wipe weights, optimizer and schedule, and restore them as Lightning does on resume.

    `schedules` is how the learning rates' schedules began.
    """
    trainer.save_checkpoint(path)
    for tensor in (*pl_module.parameters(), *pl_module.buffers()):
        tensor.zero_()
    for optimizer in trainer.optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    for config, beginning in zip(trainer.lr_scheduler_configs, schedules, strict=True):
        numbers = {name: value for name, value in beginning.items() if isinstance(value, int | float)}
        vars(config.scheduler).update(numbers)  # past `load_state_dict`, which may be what is wrong
    checkpoint = trainer.strategy.load_checkpoint(path, weights_only=True)
    pl_module.on_load_checkpoint(checkpoint)
    trainer.strategy.load_model_state_dict(checkpoint, strict=True)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        path.unlink()
