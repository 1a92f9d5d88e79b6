"""A transformer that predicts a property of peptides from their residues, with Lightning."""

import argparse

import lightning as L
import torch
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

RESIDUES, LENGTH = 20, 14


def make_peptides(count, seed):
    made = torch.Generator().manual_seed(seed)
    scale = torch.randn(RESIDUES, generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(RESIDUES, (count, LENGTH), generator=made)
    hydropathy = scale[tokens]
    moment = (hydropathy[:, 1:] * hydropathy[:, :-1]).mean(1) + hydropathy.mean(1)
    return TensorDataset(tokens, moment + 0.05 * torch.randn(count, generator=made))


class Peptides(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.train = make_peptides(256, seed=1)
        self.val = make_peptides(64, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)


class PropertyTransformer(L.LightningModule):
    def __init__(self, width=32, heads=4, layers=2, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(RESIDUES, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        if BUG:
            layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.05)
        else:
            layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.05, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        self.val_mse = MeanMetric()

    def forward(self, tokens):
        states = self.encoder(self.embedding(tokens) + self.position)  # (batch, length, width)
        return self.head(states.mean(1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        tokens, target = batch
        loss = nn.functional.mse_loss(self(tokens), target)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, target = batch
        self.val_mse.update((self(tokens) - target).square())
        self.log("val_mse", self.val_mse, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--out", default="runs")
    args = parser.parse_args()
    L.seed_everything(SEED)
    model = PropertyTransformer()
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=1,
        default_root_dir=args.out,
        gradient_clip_val=1.0,
        log_every_n_steps=4,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Peptides(args.batch_size))
    print("val_mse", trainer.callback_metrics["val_mse"].item())


if __name__ == "__main__":
    main()
