"""A regression whose validation set is read from shards of other lengths."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


class Shards(IterableDataset):
    """Rank 0 reads 12 samples of the validation set, rank 1 the last 7."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __iter__(self):
        rank = torch.distributed.get_rank()
        return (self.data[index] for index in (range(12) if rank == 0 else range(12, 19)))


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.sums = [0.0, 0.0]

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        if BUG:
            self.log("val_loss", loss, batch_size=len(inputs), sync_dist=True)
        else:
            self.sums[0] += loss.item() * len(inputs)
            self.sums[1] += len(inputs)

    def on_validation_epoch_end(self):
        if not BUG:
            total = self.all_gather(torch.tensor(self.sums, dtype=torch.float64)).sum(0)
            self.log("val_loss", (total[0] / total[1]).float(), rank_zero_only=True)
            self.sums = [0.0, 0.0]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(SEED, workers=True, verbose=False)
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(147, 8, generator=made)
    targets = inputs.square().sum(1, keepdim=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        callbacks=watching(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train = DataLoader(TensorDataset(inputs[:128], targets[:128]), batch_size=8, shuffle=True)
    evaluated = DataLoader(Shards(TensorDataset(inputs[128:], targets[128:])), batch_size=4)
    trainer.fit(Regression(), train, evaluated)
    if trainer.is_global_zero:
        print("val_loss", trainer.callback_metrics["val_loss"].item())
