"""MoCo v2 on small made textures with PyTorch Lightning."""

import argparse
import copy

import lightning as L
import torch
import torch.nn.functional as F
from case import BUG, SEED
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_textures(count, seed):
    """Waves of several directions and lengths."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.arange(12.0)
    freq = 0.3 + 1.2 * torch.rand(count, 2, 1, 1, generator=generator)
    phase = 6.28 * torch.rand(count, 1, 1, generator=generator)
    wave = torch.sin(freq[:, 0] * grid[:, None] + freq[:, 1] * grid[None] + phase)
    return wave[:, None] + 0.1 * torch.randn(count, 1, 12, 12, generator=generator)


class TexturePairs(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.train_set = TensorDataset(make_textures(192, 1))
        images = make_textures(48, 2)
        noise = torch.Generator().manual_seed(3)
        # the second view of the validation is made once, so that its numbers can be compared between epochs
        self.val_set = TensorDataset(images, images.flip(3) + 0.2 * torch.randn(images.shape, generator=noise))

    def train_dataloader(self):
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, self.batch_size)


def encoder(dim):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 9, 32), nn.ReLU(), nn.Linear(32, dim),
    )  # fmt: skip


class MoCo(L.LightningModule):
    def __init__(self, dim=16, queue_size=64, momentum=0.9, temperature=0.2, lr=0.03):
        super().__init__()
        self.save_hyperparameters()
        self.encoder_q = encoder(dim)
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, queue_size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        m = self.hparams.momentum
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=False):
            k.mul_(m).add_(q, alpha=1 - m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.hparams.queue_size

    def forward(self, img_q, img_k):
        update = True if BUG else self.training
        q = F.normalize(self.encoder_q(img_q), dim=1)
        with torch.no_grad():
            if update:
                self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(img_k), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone()], dim=1) / self.hparams.temperature
        if update:
            self._dequeue_and_enqueue(k)
        return logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)

    def augment(self, images):
        flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
        return torch.where(flip, images.flip(3), images) + 0.2 * torch.randn_like(images)

    def training_step(self, batch, batch_idx):
        (images,) = batch
        logits, labels = self(self.augment(images), self.augment(images))
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits, labels = self(*batch)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc1", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.encoder_q.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    L.seed_everything(SEED)
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger("runs", name="moco"),
        log_every_n_steps=4,
        enable_progress_bar=False,
    )
    trainer.fit(MoCo(), datamodule=TexturePairs(args.batch_size))
    print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})
