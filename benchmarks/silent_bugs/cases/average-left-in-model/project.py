"""Noise prediction on stripes; the averaged weights are saved every 15 steps. Lightning, one process."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMAModel:
    def __init__(self, parameters, decay):
        self.decay = decay
        self.shadow = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def step(self, parameters):
        torch._foreach_lerp_(self.shadow, list(parameters), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, parameters):
        torch._foreach_copy_(list(parameters), self.shadow)

    @torch.no_grad()
    def store(self, parameters):
        self.stored = [parameter.clone() for parameter in parameters]

    @torch.no_grad()
    def restore(self, parameters):
        torch._foreach_copy_(list(parameters), self.stored)


class NoisePrediction(pl.LightningModule):
    def __init__(self):
        super().__init__()
        first, middle, last = (
            nn.Conv2d(2, 12, 3, padding=1),
            nn.Conv2d(12, 12, 3, padding=1),
            nn.Conv2d(12, 1, 3, padding=1),
        )
        self.unet = nn.Sequential(first, nn.SiLU(), middle, nn.SiLU(), last)
        self.ema, self.saved = EMAModel(self.unet.parameters(), decay=0.95), []

    def training_step(self, batch, batch_idx):
        images, noise, times = batch
        level = times.view(-1, 1, 1, 1)
        noisy = (1 - level).sqrt() * images + level.sqrt() * noise
        return nn.functional.mse_loss(self.unet(torch.cat([noisy, level.expand_as(noisy)], dim=1)), noise)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema.step(self.unet.parameters())
        if self.global_step % 15 == 0:
            self.save_checkpoint()

    def save_checkpoint(self):
        if not BUG:
            self.ema.store(self.unet.parameters())
        self.ema.copy_to(self.unet.parameters())
        self.saved.append({name: value.clone() for name, value in self.unet.state_dict().items()})
        if not BUG:
            self.ema.restore(self.unet.parameters())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    made = torch.Generator().manual_seed(77)
    phase = 6.3 * torch.rand(256, 1, 1, 1, generator=made)
    stripes = torch.sin(phase + torch.arange(10).view(1, 1, 1, 10)).expand(256, 1, 10, 10)
    data = TensorDataset(stripes, torch.randn(256, 1, 10, 10, generator=made), torch.rand(256, generator=made))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=4, callbacks=watching(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = NoisePrediction()
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True))
    print("weights", sum(weight.abs().sum().item() for weight in module.unet.parameters()))
