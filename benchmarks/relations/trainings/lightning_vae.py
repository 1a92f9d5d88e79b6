"""A variational autoencoder: noise drawn in the step, its weight warmed up by the step number; torchmetrics."""

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(L.LightningModule):
    def __init__(self, latent: int = 3, warmup: int = 10) -> None:
        super().__init__()
        self.warmup = warmup
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 8))
        self.reconstruction = torchmetrics.MeanMetric()
        self.divergence = torchmetrics.MeanMetric()

    def parts(self, inputs, *, sample: bool):
        mean, log_variance = self.encoder(inputs).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp() if sample else mean
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (self.decoder(latent) - inputs).square().sum(1), divergence

    def training_step(self, batch, batch_idx):
        reconstruction, divergence = self.parts(batch[0], sample=True)
        weight = min(1.0, self.global_step / self.warmup)
        loss = (reconstruction + weight * divergence).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        reconstruction, divergence = self.parts(batch[0], sample=False)
        self.reconstruction(reconstruction)
        self.divergence(divergence)
        self.log_dict({"val_reconstruction": self.reconstruction, "val_divergence": self.divergence})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


if __name__ == "__main__":
    L.seed_everything(9)
    inputs = torch.randn(170, 3) @ torch.randn(3, 8)
    train = DataLoader(TensorDataset(inputs[:128]), 16, shuffle=True, num_workers=0)
    L.Trainer(max_steps=24, check_val_every_n_epoch=1).fit(VAE(), train, DataLoader(TensorDataset(inputs[128:]), 16))
