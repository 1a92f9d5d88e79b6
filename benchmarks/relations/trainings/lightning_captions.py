"""Pictures with a name each: a batch is a dictionary with a tensor and a list of words, which the module encodes."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS = ("red", "green", "blue", "dark", "bright")


class Named(Dataset):
    def __init__(self, first: int, count: int) -> None:
        made = torch.Generator().manual_seed(first)
        self.numbers = torch.randint(0, len(WORDS), (count,), generator=made).tolist()
        looks = torch.randn(len(WORDS), 12, generator=torch.Generator().manual_seed(0))
        self.pictures = looks[self.numbers] + 0.5 * torch.randn(count, 12, generator=made)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"picture": self.pictures[index], "name": WORDS[self.numbers[index]]}


class Namer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, len(WORDS)))
        self.right = self.total = 0

    def losses(self, batch):
        logits = self.seen(batch["picture"])
        wanted = torch.tensor([WORDS.index(name) for name in batch["name"]], device=self.device)
        return logits, wanted, nn.functional.cross_entropy(logits, wanted)

    def training_step(self, batch, batch_idx):
        return self.losses(batch)[2]

    def validation_step(self, batch, batch_idx):
        logits, wanted, _ = self.losses(batch)
        right = (logits.argmax(1) == wanted).float().mean()
        self.log("val_right", right, batch_size=len(wanted), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


pl.seed_everything(1, verbose=False)
trainer = pl.Trainer(max_epochs=4, strategy="ddp", devices=2, accelerator="cpu")
trainer.fit(Namer(), DataLoader(Named(1, 64), 8, shuffle=True), DataLoader(Named(2, 24), 6))
