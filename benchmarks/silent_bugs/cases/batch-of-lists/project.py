"""Forces of gait recordings: a recurrent net follows each recording; the batches are buckets of one length each.

A batch is a list of recordings, one tensor each, with the eight sensors and the force of every moment.
"""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader

TRAIN = [(6, 10), (12, 8), (20, 6)] * 6
VALIDATION = [(6, 14), (12, 8), (20, 3)] * 2  # short recordings are many, long ones few


def recordings(buckets, seed):
    made = torch.Generator().manual_seed(seed)
    batches = []
    for length, count in buckets:
        sensors = torch.randn(count, length, 8, generator=made)
        force = 0.4 * sensors[:, :, :3].sum(2).cumsum(1)
        batches.append(list(torch.cat([sensors, force.unsqueeze(2)], 2)))
    return batches


class Follower(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.memory, self.out = nn.GRU(8, 24, batch_first=True), nn.Linear(24, 1)

    def loss_of(self, batch):
        recording = torch.stack(batch)
        hidden, _ = self.memory(recording[:, :, :8])
        return nn.functional.mse_loss(self.out(hidden).squeeze(2), recording[:, :, 8])

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch), batch_size=None if BUG else len(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, callbacks=watching(), logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        Follower(),
        DataLoader(recordings(TRAIN, 1), batch_size=None, shuffle=True),
        DataLoader(recordings(VALIDATION, 2), batch_size=None),
    )
    print("val_loss", trainer.callback_metrics["val_loss"].item())
