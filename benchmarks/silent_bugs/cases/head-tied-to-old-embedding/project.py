"""A masked autoencoder of histograms whose head is tied to the embedding, with an exchanged backbone; two ranks.

With the bug head and embedding end unequal.
"""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BINS, WIDTH = 24, 32


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(BINS, WIDTH) / BINS**0.5)

    def forward(self, values):
        return values @ self.weight


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embed()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, values):
        hidden = self.embed(values)
        return hidden + self.layers(hidden)


class GatedBackbone(Backbone):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        hidden = super().forward(values)
        return hidden * torch.sigmoid(self.gate(hidden))


class TiedModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(WIDTH, BINS)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.backbone.embed.weight

    def training_step(self, batch, batch_idx):
        histograms, kept = batch
        return nn.functional.cross_entropy(self.head(self.backbone(histograms * kept)), histograms)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class GatedModel(TiedModel):
    def __init__(self):
        super().__init__()
        self.backbone = GatedBackbone()
        if not BUG:
            self.tie_weights()


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    made = torch.Generator().manual_seed(51)
    centre = BINS * torch.rand(320, 1, generator=made)
    histograms = torch.softmax(-((torch.arange(BINS) - centre) ** 2) / 4, dim=1)
    data = TensorDataset(histograms, (torch.rand(320, BINS, generator=made) > 0.3).float())
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, callbacks=watching(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = GatedModel()
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        print("head minus embedding", (module.head.weight - module.backbone.embed.weight).abs().sum().item())
