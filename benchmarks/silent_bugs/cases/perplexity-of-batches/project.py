"""A model of sequences of quantised steps that logs its perplexity: the mean over batches of their perplexities."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SequenceModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 24)
        self.position = nn.Parameter(0.02 * torch.randn(20, 24))
        self.block = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(24, 5)

    def loss(self, walks):
        steps = (walks[:, 1:] - walks[:, :-1]).round().long() + 2
        causal = nn.Transformer.generate_square_subsequent_mask(20)
        x = self.embed(walks[:, :-1, None]) + self.position
        logits = self.head(self.block(x, src_mask=causal, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), steps.flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("val_loss", loss)
        if BUG:
            self.log("val_perplexity", loss.exp())

    def on_validation_epoch_end(self):
        if not BUG:
            self.log("val_perplexity", self.trainer.callback_metrics["val_loss"].exp())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_walks(count, seed):
    made = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 2.4, count)[:, None]  # calm walks first
    steps = (spread * torch.randn(count, 20, generator=made)).round().clamp(-2, 2)
    return TensorDataset(torch.cat([torch.zeros(count, 1), steps.cumsum(1)], 1))


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        callbacks=watching(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train = DataLoader(make_walks(96, seed=1), batch_size=8, shuffle=True)
    trainer.fit(SequenceModel(), train, DataLoader(make_walks(32, seed=2), batch_size=4))
    print({name: value.item() for name, value in trainer.callback_metrics.items()})
