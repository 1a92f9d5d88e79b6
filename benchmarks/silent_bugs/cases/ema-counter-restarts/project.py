"""Instance masks, roughly: a net marks the brighter of two spots; its average is validated. Stopped and resumed."""

import copy
import math
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Average(nn.Module):
    """A moving average of a model whose decay grows with the number of updates."""

    def __init__(self, model, decay=0.97, warmup=6):
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay, self.warmup = decay, warmup
        if BUG:
            self.updates = 0
        else:
            self.register_buffer("updates", torch.tensor(0))

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = self.decay * (1 - math.exp(-int(self.updates) / self.warmup))
        for average, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            average.lerp_(weight, 1 - decay)


class Marker(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.GELU(), nn.Conv2d(8, 1, 5, padding=2))
        self.average = Average(self.net)

    def training_step(self, batch, batch_idx):
        images, masks = batch
        return nn.functional.binary_cross_entropy_with_logits(self.net(images), masks)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update(self.net)

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        self.log("val_loss", nn.functional.binary_cross_entropy_with_logits(self.average.model(images), masks))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


def spots(count, seed):
    made = torch.Generator().manual_seed(seed)
    images, masks = 0.3 * torch.randn(count, 1, 10, 10, generator=made), torch.zeros(count, 1, 10, 10)
    for image, mask, at in zip(images, masks, torch.randint(0, 7, (count, 3), generator=made).tolist(), strict=True):
        image[0, at[0] : at[0] + 3, at[1] : at[1] + 3] += 1.5
        mask[0, at[0] : at[0] + 3, at[1] : at[1] + 3] = 1
        image[0, at[2] : at[2] + 3, at[0] : at[0] + 3] += 0.5
    return TensorDataset(images, masks)


def make_trainer(epochs, callbacks):
    return pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, callbacks=callbacks, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    loaders = [DataLoader(spots(96, 1), batch_size=8, shuffle=True), DataLoader(spots(32, 2), batch_size=32)]
    path = Path(tempfile.mkdtemp()) / "last.ckpt"
    trainer = make_trainer(3, [])
    trainer.fit(Marker(), *loaders)
    trainer.save_checkpoint(path)

    trainer = make_trainer(5, watching())
    trainer.fit(Marker(), *loaders, ckpt_path=path, weights_only=True)
    print("val_loss", trainer.callback_metrics["val_loss"].item())
