"""A transformer language model: tied weights, recomputed blocks, warm-up and cosine by step, weight decay by group."""

import math

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

LETTERS, CONTEXT = 16, 12


class Text(Dataset):
    def __init__(self, length: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.letters = (torch.arange(length) * 3 + torch.randint(2, (length,), generator=draw)) % LETTERS

    def __len__(self) -> int:
        return (len(self.letters) - 1) // CONTEXT

    def __getitem__(self, index: int):
        part = self.letters[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return part[:-1], part[1:]


class LanguageModel(L.LightningModule):
    def __init__(self, width: int = 32, depth: int = 2, lr: float = 3e-3, warmup: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)
        layer = {"d_model": width, "nhead": 4, "dim_feedforward": 64, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, letters):
        hidden = self.letters(letters) + self.places.weight[: letters.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(letters.shape[1], device=letters.device)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, mask, use_reentrant=False) if self.training else block(hidden, mask)
        return self.head(self.norm(hidden))

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log_dict({"train/loss": loss, "train/perplexity": loss.exp()}, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self):
        groups = [
            {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        total, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    L.seed_everything(42)
    train = DataLoader(Text(12 * 80 + 1, 0), batch_size=10, shuffle=True)
    validation = DataLoader(Text(12 * 23 + 1, 1), batch_size=10)
    keep = ModelCheckpoint(monitor="val/loss", every_n_train_steps=None, save_on_train_epoch_end=False)
    L.Trainer(max_epochs=3, gradient_clip_val=1.0, callbacks=[keep]).fit(LanguageModel(), train, validation)


if __name__ == "__main__":
    main()
