"""Flow matching on two-dimensional shapes, with an average of the weights that a callback keeps."""

import copy

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMA(pl.Callback):
    def __init__(self, decay=0.95):
        self.decay = decay
        self.steps_seen = 0

    def on_fit_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module.network)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not BUG and trainer.global_step == self.steps_seen:
            return
        self.steps_seen = trainer.global_step
        for average, parameter in zip(self.average.parameters(), pl_module.network.parameters(), strict=True):
            average.lerp_(parameter, 1 - self.decay)


class FlowMatching(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(33, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))

    def training_step(self, batch, batch_idx):
        curves, noise, times = batch
        mixed = (1 - times) * noise + times * curves
        return nn.functional.mse_loss(self.network(torch.cat([mixed, times], dim=1)), curves - noise)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def curves(count=512):
    made = torch.Generator().manual_seed(31)
    angles = torch.linspace(0, 6.28, 16) + 6.28 * torch.rand(count, 1, generator=made)
    radius = 1 + 0.3 * torch.rand(count, 1, generator=made)
    points = torch.cat([radius * angles.cos(), radius * angles.sin()], dim=1)
    return TensorDataset(points, torch.randn(count, 32, generator=made), torch.rand(count, 1, generator=made))


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    ema = EMA()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=5, accumulate_grad_batches=4, logger=False,
        callbacks=[*watching(), ema], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(FlowMatching(), DataLoader(curves(), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print("weights of the average", sum(weight.abs().sum().item() for weight in ema.average.parameters()))
