"""Small images and their captions, embedded into one space with a contrastive loss over the batch of all ranks."""

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from case import BUG, SEED, watching
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, TensorDataset

KINDS, WORDS = 12, 6


def gather(features):
    """The features of all ranks, through which gradients flow; without other ranks the features as they are."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        gathered = all_gather(features)
        if not BUG:
            return torch.cat(gathered)
    return features


class Captioned(pl.LightningModule):
    def __init__(self, width=24):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(128, width)
        )
        self.words = nn.EmbeddingBag(KINDS * WORDS, width, mode="mean")
        self.caption = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))
        self.kept = []

    def forward(self, images, captions):
        features = self.image(images), self.caption(self.words(captions))
        return [nn.functional.normalize(feature, dim=-1) for feature in features]

    def training_step(self, batch, batch_idx):
        images, captions = (gather(features) for features in self(*batch))
        logits = self.log_scale.exp() * images @ captions.T
        targets = torch.arange(len(logits))
        both = nn.functional.cross_entropy(logits, targets) + nn.functional.cross_entropy(logits.T, targets)
        return both / 2

    def validation_step(self, batch, batch_idx):
        self.kept.append(torch.cat(self(*batch), 1))

    def on_validation_epoch_end(self):
        images, captions = self.all_gather(torch.cat(self.kept)).flatten(0, -2).chunk(2, dim=1)
        self.kept.clear()
        found = (images @ captions.T).argmax(1)
        self.log("val_found", (found == torch.arange(len(found))).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_pairs(count, seed):
    """Images made of patterns that their captions name: one word for each place of the image."""
    patterns = torch.randn(WORDS, KINDS, 8, 8, generator=torch.Generator().manual_seed(2))
    made = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, KINDS, (count, WORDS), generator=made)
    images = patterns[torch.arange(WORDS), kinds].mean(1, keepdim=True)
    return TensorDataset(images + 0.1 * torch.randn(images.shape, generator=made), kinds + KINDS * torch.arange(WORDS))


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
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
        num_sanity_val_steps=0,
    )
    train = DataLoader(make_pairs(256, seed=3), batch_size=16, shuffle=True, drop_last=True)
    trainer.fit(Captioned(), train, DataLoader(make_pairs(64, seed=4), batch_size=16))
    if trainer.is_global_zero:
        print("val_found", trainer.callback_metrics["val_found"].item())
