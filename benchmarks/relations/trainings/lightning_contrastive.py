"""Contrastive learning on two ranks: the other samples are those of all ranks, gathered with gradients."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    """Two noisy views of a point; the noise of a sample follows torch's generator."""

    def __init__(self, count: int, seed: int, fixed: bool = False) -> None:
        self.points = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
        self.fixed = fixed

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int):
        draw = torch.Generator().manual_seed(index) if self.fixed else None
        return self.points[index] + 0.1 * torch.randn(2, 6, generator=draw)


class Contrastive(L.LightningModule):
    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        self.temperature = temperature
        self.encoder = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8))

    def training_step(self, views, batch_idx):
        first, second = (F.normalize(self.encoder(view), dim=1) for view in views.unbind(1))
        # The gradient of all_gather is summed over ranks and DDP takes the mean, as one process with all rows does.
        all_first, all_second = (self.all_gather(part, sync_grads=True).reshape(-1, 8) for part in (first, second))
        targets = torch.arange(len(first), device=self.device) + self.global_rank * len(first)
        forth = F.cross_entropy(first @ all_second.T / self.temperature, targets)
        back = F.cross_entropy(second @ all_first.T / self.temperature, targets)
        loss = (forth + back) / 2
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, views, batch_idx):
        first, second = (F.normalize(self.encoder(view), dim=1) for view in views.unbind(1))
        self.log("val_alignment", (first - second).square().sum(1).mean(), batch_size=len(views), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", devices=2, strategy="ddp")
    train = DataLoader(Views(96, 0), 8, shuffle=True, drop_last=True)
    trainer.fit(Contrastive(), train, DataLoader(Views(24, 1, fixed=True), 4))
