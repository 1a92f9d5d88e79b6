"""Sentences in batches of like lengths (a batch sampler of our own), a GRU with masks, metrics by torchmetrics."""

from collections.abc import Iterator

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

WORDS, PAD = 20, 0


def sentences(count: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (count,), generator=draw).tolist()
    words = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]
    return [(one, int((one < 10).sum() > (one >= 10).sum())) for one in words]


def collate(batch):
    words, labels = zip(*batch, strict=True)
    return pad_sequence(words, batch_first=True, padding_value=PAD), torch.tensor(labels)


class Buckets(Sampler[list[int]]):
    """Batches of sentences of nearly one length, in another order each epoch."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(self.epoch)
        yield from (self.batches[place] for place in torch.randperm(len(self.batches), generator=draw).tolist())

    def __len__(self) -> int:
        return len(self.batches)


class Sentiment(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=PAD)
        self.recurrent, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 2)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=2, average="macro")

    def forward(self, words):
        hidden, _ = self.recurrent(self.embedding(words))
        mask = (words != PAD).unsqueeze(2)
        return self.head((hidden * mask).sum(1) / mask.sum(1))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        for name, metric in (("val_acc", self.accuracy), ("val_f1", self.f1)):
            metric(self(batch[0]), batch[1])
            self.log(name, metric)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


if __name__ == "__main__":
    L.seed_everything(0)
    train, held_out = sentences(90, 0), sentences(31, 1)
    buckets = Buckets([len(words) for words, _ in train], 12)
    loader = DataLoader(train, batch_sampler=buckets, collate_fn=collate)
    trainer = L.Trainer(max_epochs=3, use_distributed_sampler=False, gradient_clip_val=0.5)
    trainer.fit(Sentiment(), loader, DataLoader(held_out, 8, collate_fn=collate))
