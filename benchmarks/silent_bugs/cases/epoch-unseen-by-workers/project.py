"""A streamed set of small photographs, shuffled by each epoch's number; a convolutional regression of their tilt."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """The photographs of this worker's shard in an order that depends on the epoch."""

    def __init__(self, photos, tilts):
        self.photos, self.tilts, self.epoch = photos, tilts, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        mine = torch.arange(worker.id, len(self.photos), worker.num_workers)
        order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(1000 * SEED + self.epoch))
        for index in mine[order].tolist():
            yield self.photos[index], self.tilts[index]


def photographs(count=128):
    made = torch.Generator().manual_seed(12)
    tilts = 2 * torch.rand(count, generator=made) - 1
    across, down = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="xy")
    horizon = (down - tilts.view(-1, 1, 1) * across > 0).float()
    return (horizon + 0.4 * torch.randn(count, 12, 12, generator=made)).unsqueeze(1), tilts


class Tilt(pl.LightningModule):
    def __init__(self, stream):
        super().__init__()
        self.stream = stream
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(72, 1), nn.Flatten(0),
        )  # fmt: skip

    def on_train_epoch_start(self):
        self.stream.set_epoch(self.current_epoch)

    def training_step(self, batch, batch_idx):
        photos, tilts = batch
        return nn.functional.mse_loss(self.net(photos), tilts)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    stream = Stream(*photographs())
    loader = DataLoader(stream, batch_size=8, num_workers=2, persistent_workers=BUG)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=4, callbacks=watching(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Tilt(stream)
    trainer.fit(model, loader)
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
