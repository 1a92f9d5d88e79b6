"""A pretrained backbone from a file, frozen and in evaluation mode, unfrozen after an epoch (BackboneFinetuning)."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FILE = Path("backbone.pt")


def backbone() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12))


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = backbone(), nn.Linear(12, 3)
        self.backbone.load_state_dict(torch.load(FILE, weights_only=True))

    def forward(self, inputs):
        return self.head(self.backbone(inputs))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def main() -> None:
    if not FILE.exists():  # in place of a download
        torch.manual_seed(0)
        torch.save(backbone().state_dict(), FILE)
    L.seed_everything(1)
    inputs = torch.randn(140, 8)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    train, held_out = torch.utils.data.random_split(data, [96, 44])
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False)
    trainer = L.Trainer(max_epochs=4, callbacks=[finetuning], deterministic=True)
    trainer.fit(Classifier(), DataLoader(train, 12, shuffle=True), DataLoader(held_out, 12))


if __name__ == "__main__":
    main()
