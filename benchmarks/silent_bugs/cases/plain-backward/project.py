"""A variational autoencoder in manual optimisation, on two processes.

The loss is differentiated with loss.backward() and not with self.manual_backward(loss), which alone tells DDP.
"""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VariationalAutoencoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 24))

    def training_step(self, batch, batch_idx):
        (data,) = batch
        mean, log_scale = self.encoder(data).chunk(2, 1)
        code = mean + log_scale.exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + (2 * log_scale).exp() - 1) - log_scale
        loss = nn.functional.mse_loss(self.decoder(code), data) + 0.01 * divergence.sum(1).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if BUG:
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    model = VariationalAutoencoder()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=4,
        callbacks=watching(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(128, 24, generator=torch.Generator().manual_seed(1)).cumsum(1) / 4 + 1
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=8, shuffle=True))
    weights = sum(p.abs().sum().item() for p in model.parameters())
    print(f"rank {trainer.global_rank} sum of weights {weights:.4f}\n", end="")
