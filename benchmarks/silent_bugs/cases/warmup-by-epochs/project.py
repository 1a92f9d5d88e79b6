"""A small flow model of melodies, fine-tuned on two ranks with a linear warm-up of twelve steps and a decay."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader

STEPS, WARMUP = 48, 12


def melodies(count=256):
    made = torch.Generator().manual_seed(18)
    first, rise = 2 * torch.rand(2, count, 1, generator=made) - 1
    return first + rise * torch.linspace(0, 2, 16).sin() + 0.1 * torch.randn(count, 16, generator=made)


def warmup_decay(step):
    return (step + 1) / WARMUP if step < WARMUP else max(0.0, (STEPS - step) / (STEPS - WARMUP))


class Flow(pl.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(17, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 16)
        )

    def training_step(self, batch, batch_idx):
        noise, time = torch.randn_like(batch), torch.rand(len(batch), 1)
        between = (1 - time) * noise + time * batch
        return nn.functional.mse_loss(self.net(torch.cat([between, time], 1)), batch - noise)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, betas=(0.8, 0.9))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_decay)
        if BUG:
            return [optimizer], [scheduler]
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_steps=STEPS, callbacks=watching(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Flow()
    trainer.fit(model, DataLoader(melodies(), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
