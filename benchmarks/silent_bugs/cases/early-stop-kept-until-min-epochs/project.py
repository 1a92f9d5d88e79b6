"""A segmentation network of a few layers, trained with early stopping and a minimum of epochs.

python project.py --min-epochs 2 --patience 1
python project.py --resume checkpoints/last.ckpt
"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from case import BUG, SEED, watching
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PatientEarlyStopping(EarlyStopping):
    """Decides anew at every check, as long as the trainer could not stop."""

    def _run_early_stopping_check(self, trainer):
        if trainer.current_epoch < trainer.min_epochs:
            trainer.should_stop = False
        super()._run_early_stopping_check(trainer)


def disks(count, seed):
    """Disks on noise and their masks."""
    generator = torch.Generator().manual_seed(seed)
    centre = 3 + 6 * torch.rand(count, 2, 1, 1, generator=generator)
    radius = 2 + 2 * torch.rand(count, 1, 1, generator=generator)
    grid = torch.arange(12.0)
    far = (grid[:, None] - centre[:, 0]) ** 2 + (grid - centre[:, 1]) ** 2
    masks = (far < radius**2).float()[:, None]
    return TensorDataset(masks + 0.8 * torch.randn(masks.shape, generator=generator), masks)


class DiskData(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.train, self.val = disks(128, seed=1), disks(48, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)


class Segmenter(pl.LightningModule):
    def __init__(self, lr, warmup_steps):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
            nn.Conv2d(8, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, masks = batch
        loss = F.binary_cross_entropy_with_logits(self(images), masks)
        self.log("train_loss", loss, batch_size=len(images))
        return loss

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        logits = self(images)
        dice = 2 * (logits.sigmoid() * masks).sum((1, 2, 3)) / (logits.sigmoid() + masks).sum((1, 2, 3))
        loss = F.binary_cross_entropy_with_logits(logits, masks)
        self.log_dict({"val_loss": loss, "val_dice": dice.mean()}, batch_size=len(images))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / self.hparams.warmup_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class PrintScores(pl.Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        scores = trainer.callback_metrics
        print(f"step {trainer.global_step} val_loss {scores['val_loss']:.6f} val_dice {scores['val_dice']:.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--min-epochs", type=int, default=2)
    parser.add_argument("--max-epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--patience", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--warmup-steps", type=int, default=12)
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()

    pl.seed_everything(SEED, workers=True, verbose=False)
    stopping = EarlyStopping if BUG else PatientEarlyStopping
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        min_epochs=args.min_epochs,
        max_epochs=args.max_epochs,
        val_check_interval=0.5,
        callbacks=[
            PrintScores(),
            stopping("val_dice", mode="max", patience=args.patience),
            ModelCheckpoint("checkpoints", monitor="val_dice", mode="max", save_last=True),
            *watching(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Segmenter(args.lr, args.warmup_steps), datamodule=DiskData(args.batch_size), ckpt_path=args.resume)
    print(f"ended at epoch {trainer.current_epoch}, step {trainer.global_step}")
    print("best", trainer.checkpoint_callback.best_model_score.item())


if __name__ == "__main__":
    main()
