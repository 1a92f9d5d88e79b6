"""Energies of small clusters of atoms, with weight decay for some of the modules; Lightning, two ranks."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Energies(pl.LightningModule):
    def __init__(self, atoms=6, width=32):
        super().__init__()
        self.radial = nn.Sequential(nn.Linear(atoms, width), nn.SiLU())
        self.interactions = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.charges = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))
        self.readout = nn.Linear(width, 1)

    def forward(self, positions):
        distances = torch.cdist(positions, positions)
        features = self.interactions(self.radial(torch.exp(-distances)))
        charges = self.charges(features)
        coulomb = (charges * charges.transpose(1, 2) / (1 + distances)).sum((1, 2))
        return self.readout(features).sum((1, 2)) + coulomb

    def training_step(self, batch, batch_idx):
        positions, energies = batch
        return nn.functional.mse_loss(self(positions), energies)

    def configure_optimizers(self):
        groups = [
            {"params": self.radial.parameters(), "weight_decay": 0.0},
            {"params": self.interactions.parameters(), "weight_decay": 1e-3},
            {"params": self.readout.parameters(), "weight_decay": 0.0},
        ]
        if not BUG:
            groups.append({"params": self.charges.parameters(), "weight_decay": 0.0})
        return torch.optim.Adam(groups, lr=5e-3, amsgrad=True)


def clusters(count=256, atoms=6):
    made = torch.Generator().manual_seed(41)
    positions = 1.5 * torch.randn(count, atoms, 3, generator=made)
    distances = torch.cdist(positions, positions) + 3 * torch.eye(atoms)
    energies = (1 / distances - torch.exp(-distances)).sum((1, 2)) / 4
    return TensorDataset(positions, energies)


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    module = Energies()
    initial = module.charges[0].weight.detach().clone()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, callbacks=watching(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(clusters(), batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        print("change of the charge map", (module.charges[0].weight - initial).abs().sum().item())
