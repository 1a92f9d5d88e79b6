"""A classifier of spectra with 21 spectra for validation, shared by two processes: one is read by both."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Spectra(pl.LightningDataModule):
    def setup(self, stage):
        made = torch.Generator().manual_seed(7)
        labels = torch.randint(3, (149,), generator=made)
        spectra = torch.randn(149, 1, 24, generator=made)
        spectra[torch.arange(149), 0, 8 * labels + 3] += 2
        self.train = TensorDataset(spectra[:128], labels[:128])
        self.val = TensorDataset(spectra[128:], labels[128:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=DistributedSampler(self.train, seed=SEED))

    def val_dataloader(self):
        if BUG:
            sampler = DistributedSampler(self.val, shuffle=False)
        else:
            sampler = range(self.trainer.global_rank, len(self.val), self.trainer.world_size)
        return DataLoader(self.val, batch_size=4, sampler=sampler)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(160, 3))
        self.val_acc = MulticlassAccuracy(num_classes=3, average="micro")

    def training_step(self, batch, batch_idx):
        spectra, labels = batch
        return nn.functional.cross_entropy(self.net(spectra), labels)

    def validation_step(self, batch, batch_idx):
        spectra, labels = batch
        self.val_acc(self.net(spectra), labels)
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        use_distributed_sampler=False,
        callbacks=watching(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(), datamodule=Spectra())
    if trainer.is_global_zero:
        print("val_acc", trainer.callback_metrics["val_acc"].item())
