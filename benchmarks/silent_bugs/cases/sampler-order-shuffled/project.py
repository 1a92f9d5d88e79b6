"""A regression with a curriculum: a sampler gives the easy rows first and the hard ones last.

With two processes the trainer wraps the sampler into a distributed one of its own, which shuffles.
"""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Curriculum(Sampler):
    def __init__(self, difficulty, replicas=1, rank=0):
        self.order = difficulty.argsort().tolist()[rank::replicas]

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


class Rows(pl.LightningDataModule):
    def setup(self, stage):
        made = torch.Generator().manual_seed(2)
        self.difficulty = torch.rand(192, generator=made)
        rows = torch.randn(192, 16, generator=made)
        noise = self.difficulty * torch.randn(192, generator=made)
        self.dataset = TensorDataset(rows, (rows[:, :3].sum(1) + noise).unsqueeze(1))

    def train_dataloader(self):
        split = {} if BUG else {"replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        return DataLoader(self.dataset, batch_size=8, sampler=Curriculum(self.difficulty, **split))


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        rows, targets = batch
        return nn.functional.mse_loss(self.layers(rows), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    model = Regression()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=3,
        use_distributed_sampler=BUG,
        callbacks=watching(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Rows())
    if trainer.is_global_zero:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))
