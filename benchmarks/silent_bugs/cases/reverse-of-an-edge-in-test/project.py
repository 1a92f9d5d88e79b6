"""Links of a protein-like network, predicted by a small graph convolution."""

from argparse import ArgumentParser

import lightning as L
import torch
from case import BUG, SEED
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

NODES = 150


def make_network(seed):
    """Features of the nodes, and a list of edges that has both directions of each."""
    made = torch.Generator().manual_seed(seed)
    group = torch.arange(NODES) % 5
    chance = torch.where(group[:, None] == group[None], 0.18, 0.02)
    upper = (torch.rand(NODES, NODES, generator=made) < chance).triu(1)
    features = 0.5 * nn.functional.one_hot(group, 8) + torch.randn(NODES, 8, generator=made)
    return features, (upper | upper.T).nonzero()


def split(edges, fraction, made):
    order = torch.randperm(len(edges), generator=made)
    size = int(len(edges) * fraction)
    return edges[order[2 * size :]], edges[order[size : 2 * size]], edges[order[:size]]


class LinkData(L.LightningDataModule):
    def __init__(self, batch_size, seed=3):
        super().__init__()
        self.batch_size = batch_size
        made = torch.Generator().manual_seed(seed)
        self.features, edges = make_network(seed)
        connected = torch.zeros(NODES, NODES, dtype=torch.bool)
        connected[edges[:, 0], edges[:, 1]] = True
        if not BUG:
            edges = edges[edges[:, 0] < edges[:, 1]]
        absent = (~connected).triu(1).nonzero()
        absent = absent[torch.randperm(len(absent), generator=made)[: len(edges)]]
        positive, negative = split(edges, 0.15, made), split(absent, 0.15, made)
        self.known = positive[0]
        self.parts = [
            TensorDataset(
                torch.cat([there, not_there]), torch.cat([torch.ones(len(there)), torch.zeros(len(not_there))])
            )
            for there, not_there in zip(positive, negative, strict=True)
        ]

    def train_dataloader(self):
        return DataLoader(self.parts[0], self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.parts[2], self.batch_size)


class LinkPredictor(L.LightningModule):
    def __init__(self, features, known, hidden=32, lr=1e-2):
        super().__init__()
        self.lr = lr
        adjacency = torch.eye(NODES)
        adjacency[known[:, 0], known[:, 1]] = 1
        adjacency[known[:, 1], known[:, 0]] = 1
        scale = adjacency.sum(1).rsqrt()
        self.register_buffer("adjacency", scale[:, None] * adjacency * scale)
        self.register_buffer("features", features)
        self.first = nn.Linear(features.shape[1], hidden)
        self.second = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.2)
        self.bias = nn.Parameter(torch.zeros(()))
        self.val_auc, self.test_auc = BinaryAUROC(), BinaryAUROC()

    def forward(self, pairs):
        hidden = (self.adjacency @ self.first(self.features)).relu()
        nodes = self.adjacency @ self.second(self.dropout(hidden))
        return (nodes[pairs[:, 0]] * nodes[pairs[:, 1]]).sum(1) + self.bias

    def training_step(self, batch, batch_idx):
        pairs, linked = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(pairs), linked)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pairs, linked = batch
        score = self(pairs)
        self.val_auc.update(score, linked.long())
        loss = nn.functional.binary_cross_entropy_with_logits(score, linked)
        self.log("val_loss", loss, batch_size=len(linked))
        self.log("val_auc", self.val_auc, on_step=False, on_epoch=True)

    def test_step(self, batch, batch_idx):
        pairs, linked = batch
        self.test_auc.update(self(pairs), linked.long())
        self.log("test_auc", self.test_auc, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=48)
    parser.add_argument("--max_epochs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=32)
    args = parser.parse_args()

    L.seed_everything(SEED, workers=True)
    data = LinkData(args.batch_size)
    model = LinkPredictor(data.features, data.known, args.hidden)
    best = ModelCheckpoint(monitor="val_auc", mode="max", dirpath="runs/links")
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        accelerator="cpu",
        devices=1,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data)
    print(f"best validation AUC {best.best_model_score:.4f}")
    trainer.test(model, data, ckpt_path="best")
