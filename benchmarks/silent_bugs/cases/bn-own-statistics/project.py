"""Tumour or not on small images; every rank trains on the scanner whose files its machine holds."""

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from case import BUG, SEED, watching
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(16, 2)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.head(self.features(images)), labels)

    def on_validation_epoch_start(self):
        if not BUG:
            for name, buffer in self.named_buffers():
                if "running" in name:
                    dist.all_reduce(buffer)
                    buffer /= dist.get_world_size()

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.features(images)), labels)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def scans(count, seed):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=made)
    images = torch.randn(count, 1, 12, 12, generator=made)
    images[:, :, 4:7, 5:8] += 1.5 * labels.view(-1, 1, 1, 1)
    images[1::2] = 0.8 * images[1::2] + 0.4  # every second file is of the other scanner
    return TensorDataset(images, labels)


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=DDPStrategy(forward_sync_buffers=False), devices=2, max_epochs=3,
        use_distributed_sampler=False,
        callbacks=watching(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip

    def loader(data, size):
        rank = trainer.local_rank
        return DataLoader(
            data, batch_size=size, sampler=DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        )

    trainer.fit(Classifier(), loader(scans(192, 1), 12), loader(scans(64, 2), 32))
    if trainer.is_global_zero:
        print("val_loss", trainer.callback_metrics["val_loss"].item())
