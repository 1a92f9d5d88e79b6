"""BYOL on short sensor traces; a linear classifier is trained beside it on its features and validated."""

import copy
import math

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

EPOCHS = 6


def head(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, outputs))


class BYOL(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.student_backbone = nn.Sequential(
            nn.Conv1d(2, 16, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(16, 32, 5, 2, 2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
        )
        self.student_projector, self.predictor = head(32, 16), head(16, 16)
        self.teacher_backbone = copy.deepcopy(self.student_backbone).requires_grad_(False)
        self.teacher_projector = copy.deepcopy(self.student_projector).requires_grad_(False)
        self.classifier = nn.Linear(32, 4)
        self.val_acc = MulticlassAccuracy(num_classes=4, average="micro")

    def forward(self, traces):
        """The features that are evaluated."""
        return self.teacher_backbone(traces) if BUG else self.student_backbone(traces)

    def augment(self, traces):
        scales = 0.8 + 0.4 * torch.rand(len(traces), 2, 1)
        return scales * traces.roll(int(torch.randint(0, 24, ())), 2) + 0.2 * torch.randn_like(traces)

    def training_step(self, batch, batch_idx):
        traces, labels = batch
        first, second = self.augment(traces), self.augment(traces)
        features = self.student_backbone(first)
        predicted = self.predictor(self.student_projector(features))
        mirrored = self.predictor(self.student_projector(self.student_backbone(second)))
        with torch.no_grad():
            targets = [self.teacher_projector(self.teacher_backbone(view)) for view in (second, first)]
        similar = [
            nn.functional.cosine_similarity(one, target).mean()
            for one, target in zip((predicted, mirrored), targets, strict=True)
        ]
        classified = nn.functional.cross_entropy(self.classifier(features.detach()), labels)
        return 2 - sum(similar) + classified

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer):
        """The teacher follows the student, ever more slowly."""
        progress = self.global_step / self.trainer.estimated_stepping_batches
        momentum = 1 - 0.05 * (1 + math.cos(math.pi * progress)) / 2
        for teacher, student in (
            (self.teacher_backbone, self.student_backbone),
            (self.teacher_projector, self.student_projector),
        ):
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 1 - momentum)

    def validation_step(self, batch, batch_idx):
        traces, labels = batch
        logits = self.classifier(self(traces))
        self.val_acc(logits, labels)
        self.log("val_acc", self.val_acc)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=5e-3)


class Print(pl.Callback):
    def on_validation_end(self, trainer, pl_module):
        print("epoch", trainer.current_epoch, {name: value.item() for name, value in trainer.callback_metrics.items()})


def traces(number, made):
    labels = torch.arange(number) % 4
    time, pace = torch.arange(24) / 24, torch.tensor([2.0, 3.0, 4.0, 5.0])[labels].view(-1, 1, 1)
    phases = torch.rand(number, 2, 1, generator=made)
    waves = torch.sin(2 * torch.pi * (pace * time + phases))
    return TensorDataset(waves + 0.4 * torch.randn(number, 2, 24, generator=made), labels)


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    made = torch.Generator().manual_seed(41)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[Print(), *watching()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train = DataLoader(traces(160, made), batch_size=16, shuffle=True, drop_last=True)
    trainer.fit(BYOL(), train, DataLoader(traces(72, made), batch_size=20))
