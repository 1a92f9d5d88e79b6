"""Fine-tune a small language model on a mix of two instruction sets, the smaller of which is oversampled."""

import argparse
from itertools import chain, cycle, islice

import lightning as L
import torch
from case import BUG, SEED
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

VOCABULARY, LENGTH = 24, 17


def make_rows(count, seed, order):
    """Token rows that follow a random grammar, the more strictly the higher its order is."""
    made = torch.Generator().manual_seed(seed)
    grammar = torch.softmax(order * torch.randn(VOCABULARY, VOCABULARY, generator=made), 1)
    rows = torch.randint(VOCABULARY, (count, 1), generator=made)
    for _ in range(LENGTH - 1):
        rows = torch.cat([rows, torch.multinomial(grammar[rows[:, -1]], 1, generator=made)], 1)
    return list(rows)


def oversample(sources):
    """All sources in turn; those that are shorter than the longest begin again."""
    longest = max(len(source) for source in sources)
    return list(chain(*zip(*(islice(cycle(source), longest) for source in sources), strict=False)))


def split(rows, fraction):
    kept = len(rows) - round(len(rows) * fraction)
    return rows[:kept], rows[kept:]


class Mixture(L.LightningDataModule):
    def __init__(self, batch_size, val_split):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        sources = [make_rows(160, seed=1, order=2.0), make_rows(40, seed=2, order=0.5)]
        if BUG:
            self.train, self.val = split(oversample(sources), self.hparams.val_split)
        else:
            parts = [split(source, self.hparams.val_split) for source in sources]
            self.train = oversample([train for train, _ in parts])
            self.val = [row for _, val in parts for row in val]

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)


class LanguageModel(L.LightningModule):
    def __init__(self, width=96, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)
        self.val_loss = MeanMetric()

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])

    def losses(self, rows):
        logits = self(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")

    def training_step(self, rows, batch_idx):
        loss = self.losses(rows).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, rows, batch_idx):
        self.val_loss.update(self.losses(rows))
        self.log("val_loss", self.val_loss, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--val-split", type=float, default=0.1)
    parser.add_argument("--out", default="runs")
    args = parser.parse_args()
    L.seed_everything(SEED)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(args.out, name="mixture"),
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), datamodule=Mixture(args.batch_size, args.val_split))
    val_loss = trainer.callback_metrics["val_loss"]
    print(f"val_loss {val_loss:.4f} perplexity {val_loss.exp():.3f}")


if __name__ == "__main__":
    main()
