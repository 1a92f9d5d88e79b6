"""Detection: lists of images of unequal size and of unequal numbers of boxes; an average precision of our own."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.scenes = []
        for _ in range(count):
            height, width, boxes = (int(torch.randint(low, low + 4, (), generator=draw)) for low in (8, 8, 1))
            image = torch.randn(1, height, width, generator=draw)
            centers = torch.rand(boxes, 2, generator=draw)
            for y, x in (centers * torch.tensor([height, width])).long().tolist():
                image[0, y, x] += 6
            self.scenes.append((image, {"centers": centers, "labels": torch.ones(boxes, dtype=torch.long)}))

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int):
        return self.scenes[index]


def collate(batch):
    images, targets = zip(*batch, strict=True)
    return [*images], [*targets]


class Detector(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def forward(self, images):
        return [self.net(image[None])[0, 0] for image in images]

    def losses(self, images, targets):
        """One loss for each image."""
        losses = []
        for heat, target in zip(self(images), targets, strict=True):
            wanted = torch.zeros_like(heat)
            places = (target["centers"] * torch.tensor(heat.shape, device=heat.device)).long()
            wanted[places[:, 0], places[:, 1]] = 1
            losses.append(F.binary_cross_entropy_with_logits(heat, wanted))
        return torch.stack(losses)

    def training_step(self, batch, batch_idx):
        return self.losses(*batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.losses(*batch).mean(), batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    train = DataLoader(Scenes(40, 0), batch_size=5, shuffle=True, collate_fn=collate)
    held_out = DataLoader(Scenes(13, 1), batch_size=4, collate_fn=collate)
    pl.Trainer(max_epochs=3, callbacks=[ModelCheckpoint(monitor="val_loss")]).fit(Detector(), train, held_out)
