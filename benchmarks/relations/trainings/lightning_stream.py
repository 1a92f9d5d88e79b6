"""A stream: an `IterableDataset` that is divided among ranks and workers; a decaying rate for each step."""

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """Samples that are a function of their number."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for number in range(self.start + rank * workers + worker, self.end, ranks * workers):
            inputs = torch.randn(6, generator=torch.Generator().manual_seed(number))
            yield inputs, inputs.abs().sum(0, keepdim=True)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.huber_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.huber_loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step / 10) ** -0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(0)
    train = DataLoader(Stream(0, 96), batch_size=8)
    validation = DataLoader(Stream(1000, 1060), batch_size=8)
    L.Trainer(max_epochs=3, devices=2, accelerator="cpu", strategy="ddp").fit(Net(), train, validation)
