"""The energy of small molecules from their atoms' distances; the learning rate falls on a plateau."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

ATOMS, BATCH = 4, 16


class EpochMean(Metric):
    """The mean over the samples of an epoch."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.double), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, value, count):
        if BUG:
            self.total = value.detach().double() * count
            self.count = torch.tensor(count)
        else:
            self.total += value.detach().double() * count
            self.count += count

    def compute(self):
        return (self.total / self.count).float()


class EnergyModel(pl.LightningModule):
    def __init__(self, lr=0.03):
        super().__init__()
        self.lr = lr
        self.radial = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.energy = nn.Linear(32, 1)
        self.register_buffer("centres", torch.linspace(0.0, 3.0, 8))
        self.val_loss, self.val_mae = EpochMean(), EpochMean()

    def forward(self, distances):
        smeared = torch.exp(-4 * (distances[..., None] - self.centres) ** 2)
        return self.energy(self.radial(smeared).sum(1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        distances, energies = batch
        loss = nn.functional.mse_loss(self(distances), energies)
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        distances, energies = batch
        predicted = self(distances)
        self.val_loss.update(nn.functional.mse_loss(predicted, energies), len(energies))
        self.val_mae.update(nn.functional.l1_loss(predicted, energies), len(energies))
        self.log("val_loss", self.val_loss)
        self.log("val_mae", self.val_mae)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Molecules(pl.LightningDataModule):
    def setup(self, stage):
        self.train, self.held_out = self.make(128, 1), self.make(56, 2)

    @staticmethod
    def make(count, seed):
        made = torch.Generator().manual_seed(seed)
        places = 1.2 * torch.randn(count, ATOMS, 3, generator=made)
        first, second = torch.triu_indices(ATOMS, ATOMS, offset=1)
        distances = (places[:, first] - places[:, second]).norm(dim=2)
        energies = ((1 - torch.exp(1 - distances)) ** 2).sum(1)
        return TensorDataset(distances, energies + 0.1 * torch.randn(count, generator=made))

    def train_dataloader(self):
        return DataLoader(self.train, BATCH, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, BATCH)


class Show(pl.Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            loss, rate = trainer.callback_metrics["val_loss"].item(), trainer.optimizers[0].param_groups[0]["lr"]
            print(f"epoch {trainer.current_epoch}: val_loss {loss:.4f} at rate {rate:.5f}")


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    model = EnergyModel()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=8, logger=False, callbacks=[*watching(), Show()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, Molecules())
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
