"""What a run computed, step by step, written by a callback that every mode runs with."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from lit_cifar.callbacks import PerRankAccuracy
from lit_cifar.checkpoints import strip_prefix
from lit_cifar.commands.verify.bugs import plant
from lit_cifar.data.images import Batch
from lit_cifar.layout import Layout
from lit_cifar.models.chunked_batchnorm import ChunkedBatchNorm2d

Order = Literal["usual", "reversed", "plain_kernels"]


class Trace(L.Callback):
    """Records losses, weights, optimizer state and samples after every optimizer step, and the evaluation's counts.

    Collects through the strategy's own methods, as a checkpoint is collected, so it knows no mode. In `folder`:

    - `step<k>.pt`: loss of the global batch, the whole network's state, the whole optimizer state; written by rank 0;
    - `samples<r>.jsonl`: the ids that process `r` read, a line for each optimizer step and one for the evaluation;
    - `run.json`: number of processes, chunks that are normalised by themselves, counts of the evaluation.

    Args:
        folder: Where to write; must exist.
        reload_after: After this optimizer step, wipe weights, buffers and optimizer state and read them back from a
            checkpoint, as a run that is resumed does; 0 for never.
        order: In which order sums are made. "reversed" turns the samples round inside every chunk that is normalised
            by itself; "plain_kernels" uses torch's own convolutions in place of oneDNN's or cuDNN's. Neither changes
            what is computed, only how it is rounded.
        bug: A mistake to make, by its name in `lit_cifar.commands.verify.bugs`; to see that it is found.
    """

    def __init__(self, folder: str, *, reload_after: int = 0, order: Order = "usual", bug: str | None = None) -> None:
        self.folder = Path(folder)
        self.reload_after = reload_after
        self.order = order
        self.bug = bug
        self._step = 0
        self._loss: Tensor | float = 0.0
        self._ids: list[int] = []
        self._evaluated: list[int] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before the strategy has touched the network: plant the bug, choose the kernels."""
        # TF32 has 10 bits: the plain kernels do not, and the tolerance would be the distance between the two.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        if self.bug is not None:
            plant(self.bug, trainer, pl_module)
        if self.order == "plain_kernels":
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property in a module
            torch.backends.cudnn.enabled = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Note the samples; turn them round if asked to."""
        self._ids += batch.ids.tolist()
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
        self._write_samples(trainer, f"step {self._step}", self._ids)
        self._write_step(trainer, pl_module)
        self._loss, self._ids = 0.0, []
        if self._step == self.reload_after:
            _reload(trainer, pl_module, self.folder / "reload.ckpt")

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the samples."""
        self._evaluated += batch.ids.tolist()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down the samples of this process."""
        self._write_samples(trainer, "evaluation", self._evaluated)
        self._evaluated = []

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write down the counts, and what kind of run it was."""
        if not trainer.is_global_zero:
            return
        layout = Layout.of(trainer.strategy)
        counts = next((c.counts for c in trainer.callbacks if isinstance(c, PerRankAccuracy)), {})  # type: ignore[attr-defined]
        content = {
            "world_size": trainer.world_size,
            "chunks": asdict(layout.chunks(accumulation=trainer.accumulate_grad_batches)),
            "counts": [(count.correct, count.total) for count in counts.get("val", [])],
        }
        (self.folder / "run.json").write_text(json.dumps(content))

    def _write_samples(self, trainer: L.Trainer, when: str, ids: list[int]) -> None:
        line = {"when": when, "shard": Layout.of(trainer.strategy).shard, "ids": ids}
        with (self.folder / f"samples{trainer.global_rank}.jsonl").open("a") as file:
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


def _reverse_chunks(batch: Batch, pl_module: Any) -> None:
    """Turn the samples round inside each chunk of the batch, in place."""
    layers = (layer for layer in pl_module.modules() if isinstance(layer, ChunkedBatchNorm2d))
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
def _reload(trainer: L.Trainer, pl_module: L.LightningModule, path: Path) -> None:
    """Save a checkpoint, forget everything that was learned, and restore it, in the steps of Lightning's own resume."""
    trainer.save_checkpoint(path)
    for tensor in (*pl_module.parameters(), *pl_module.buffers()):
        tensor.zero_()
    for optimizer in trainer.optimizers:
        optimizer.state.clear()
    checkpoint = trainer.strategy.load_checkpoint(path, weights_only=True)
    pl_module.on_load_checkpoint(checkpoint)
    trainer.strategy.load_model_state_dict(checkpoint, strict=True)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        path.unlink()
