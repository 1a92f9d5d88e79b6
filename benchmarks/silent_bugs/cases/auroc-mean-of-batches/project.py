"""Finds defects in made surface patches; the checkpoint with the best AUROC is tested.

python project.py --epochs 3 --batch-size 16
"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from case import BUG, SEED, watching
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision
from torchmetrics.functional.classification import binary_auroc, binary_average_precision


def patches(count, seed):
    """Grain of 10 x 10; four of ten have a scratch, more or less deep."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) < 0.4).long()
    images = torch.randn(count, 10, 10, generator=generator)
    rows = torch.randint(10, (count,), generator=generator)
    depth = 0.4 + 1.2 * torch.rand(count, generator=generator)
    images[torch.arange(count), rows] -= (depth * labels)[:, None]
    return TensorDataset(images[:, None], labels)


class DefectModule(pl.LightningModule):
    def __init__(self, width, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, (1, 5)), nn.ReLU(), nn.Conv2d(width, width, (1, 6)), nn.ReLU(),
            nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(width, 1),
        )  # fmt: skip
        if not BUG:
            self.val_auroc, self.val_ap = BinaryAUROC(), BinaryAveragePrecision()
            self.test_auroc, self.test_ap = BinaryAUROC(), BinaryAveragePrecision()

    def forward(self, images):
        return self.net(images).squeeze(1)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.binary_cross_entropy_with_logits(self(images), labels.to(images))
        self.log("train_loss", loss, batch_size=len(images), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self._evaluate(batch, "test")

    def _evaluate(self, batch, stage):
        images, labels = batch
        logits = self(images)
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(images))
        self.log(f"{stage}_loss", loss, batch_size=len(images), sync_dist=True)
        scores = logits.sigmoid()
        if BUG:
            self.log(f"{stage}_auroc", binary_auroc(scores, labels), batch_size=len(images), sync_dist=True)
            self.log(f"{stage}_ap", binary_average_precision(scores, labels), batch_size=len(images), sync_dist=True)
        else:
            for name in ("auroc", "ap"):
                metric = getattr(self, f"{stage}_{name}")
                metric.update(scores, labels)
                self.log(f"{stage}_{name}", metric, batch_size=len(images))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-3)


class PrintScores(pl.Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        scores = {name: round(value.item(), 6) for name, value in trainer.callback_metrics.items()}
        print(f"epoch {trainer.current_epoch}", scores)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--eval-batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    pl.seed_everything(SEED, workers=True, verbose=False)
    best = ModelCheckpoint("checkpoints", filename="{epoch}", monitor="val_auroc", mode="max")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=args.epochs,
        callbacks=[PrintScores(), best, *watching()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train = DataLoader(patches(160, seed=1), args.batch_size, shuffle=True)
    val = DataLoader(patches(88, seed=2), args.eval_batch_size)
    trainer.fit(DefectModule(args.width, args.lr), train, val)
    print("best", best.best_model_score.item())
    trainer.test(dataloaders=DataLoader(patches(120, seed=3), args.eval_batch_size), ckpt_path="best", verbose=False)
    print({name: round(value.item(), 6) for name, value in trainer.callback_metrics.items() if "test" in name})


if __name__ == "__main__":
    main()
