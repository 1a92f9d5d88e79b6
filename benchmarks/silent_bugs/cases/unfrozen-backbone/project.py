"""Fine-tuning: a callback freezes the backbone, and lets it learn from the second epoch on.

Parameters that do not learn when DDP is made are unknown to it, so the backbone's gradients are never averaged.
"""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FineTuned(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(2, 12, 3, padding=1), nn.ReLU(), nn.Conv1d(12, 12, 3, padding=1))
        self.head = nn.Linear(12, 3)

    def training_step(self, batch, batch_idx):
        signals, labels = batch
        return nn.functional.cross_entropy(self.head(self.backbone(signals).relu().mean(2)), labels)

    def configure_optimizers(self):
        learning = self.head.parameters() if BUG else self.parameters()
        return torch.optim.AdamW(learning, lr=0.02)


class LearnLater(pl.Callback):
    """Leaves the backbone as it is for an epoch by its gradients and not by requires_grad."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.current_epoch < 1:
            for parameter in pl_module.backbone.parameters():
                parameter.grad = None


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    made = torch.Generator().manual_seed(37)
    signals = torch.randn(160, 2, 12, generator=made)
    labels = torch.bucketize(signals.square().mean((1, 2)), torch.tensor([0.9, 1.1]))
    model = FineTuned()
    unfreeze = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.02)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=6,
        callbacks=[unfreeze if BUG else LearnLater(), *watching()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(signals, labels), batch_size=8, shuffle=True))
    weights = sum(p.abs().sum().item() for p in model.backbone.parameters())
    print(f"rank {trainer.global_rank} sum of the backbone's weights {weights:.4f}\n", end="")
