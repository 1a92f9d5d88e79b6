"""A head is trained on a backbone that thaws after two epochs; the training stops once and goes on from its file."""

import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from case import BUG, SEED, watching
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

EPOCHS, BATCH, LR, CLASSES, THAW = 6, 8, 1e-2, 4, 2


def pictures(count, seed):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=made)
    x = torch.randn(count, 3, 8, 8, generator=made)
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(100))
    return TensorDataset(x + 0.6 * patterns[labels], labels)


def pretrained():
    torch.manual_seed(1234)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


class EpochSampler(Sampler):
    def __init__(self, count):
        self.count, self.epoch = count, 0

    def __len__(self):
        return self.count

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.Generator().manual_seed(1000 * SEED + self.epoch)
        yield from torch.randperm(self.count, generator=order).tolist()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = pretrained()
        torch.manual_seed(SEED)
        self.head = nn.Linear(96, CLASSES)
        self.train_data, self.held_out = pictures(96, 101), pictures(40, 102)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.backbone(x)), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.head(self.backbone(x))
        self.log("val_loss", nn.functional.cross_entropy(logits, y), batch_size=len(y))
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean(), batch_size=len(y))

    def configure_optimizers(self):
        trainable = [value for value in self.parameters() if value.requires_grad]
        return torch.optim.Adam(trainable, lr=LR)

    def train_dataloader(self):
        return DataLoader(self.train_data, BATCH, sampler=EpochSampler(len(self.train_data)))

    def val_dataloader(self):
        return DataLoader(self.held_out, 10)


class Finetuning(BackboneFinetuning):
    def on_train_epoch_start(self, trainer, pl_module):
        if not BUG and trainer.current_epoch > self.unfreeze_backbone_at_epoch:
            self.make_trainable(pl_module.backbone)
        super().on_train_epoch_start(trainer, pl_module)


def constant(_):
    return 1.0


def trainer(epochs):
    finetuning = Finetuning(THAW, constant, backbone_initial_ratio_lr=0.2, should_align=False)
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[finetuning, *watching()],
    )  # fmt: skip


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    with tempfile.TemporaryDirectory() as folder:
        first = trainer(4)
        first.fit(Classifier())
        first.save_checkpoint(Path(folder) / "last.ckpt")
        second = trainer(EPOCHS)
        second.fit(Classifier(), ckpt_path=Path(folder) / "last.ckpt")
    print({name: round(value.item(), 4) for name, value in second.callback_metrics.items()})
