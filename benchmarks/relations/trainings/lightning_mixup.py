"""Mixup in the step, accumulation with a ragged last window, clipping by norm, no weight decay for biases and norms."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def data(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 10, generator=draw)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Mixed(L.LightningModule):
    def __init__(self, alpha: float = 0.4) -> None:
        super().__init__()
        self.alpha = alpha
        self.body = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU())
        self.head = nn.Linear(32, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        share = torch.distributions.Beta(self.alpha, self.alpha).sample().to(inputs)
        other = torch.randperm(len(inputs), device=inputs.device)
        logits = self(share * inputs + (1 - share) * inputs[other])
        loss = share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels[other])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self(inputs)
        self.log("val_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("val_acc", (logits.argmax(1) == labels).double().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def main() -> None:
    L.seed_everything(7)
    train = DataLoader(data(112, 0), batch_size=16, shuffle=True)
    trainer = L.Trainer(max_epochs=3, accumulate_grad_batches=3, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
    trainer.fit(Mixed(), train, DataLoader(data(50, 1), batch_size=16))


if __name__ == "__main__":
    main()
