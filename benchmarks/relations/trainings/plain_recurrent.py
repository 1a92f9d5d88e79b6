"""An LSTM on padded sequences: loss per token, ReduceLROnPlateau, stopping early."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from lit_cifar import relations

PAD, WORDS = -100, 12


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.recurrent = nn.LSTM(16, 24, batch_first=True, num_layers=2, dropout=0.1)
        self.head = nn.Linear(24, 2)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.head(hidden)


def sentences(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        words = torch.randint(WORDS, (int(torch.randint(3, 9, (), generator=draw)),), generator=draw)
        made.append((words, words.cumsum(0) % 2))
    return made


def collate(batch):
    words, tags = zip(*batch, strict=True)
    lengths = torch.tensor([len(one) for one in words])
    return pad_sequence(words, True), pad_sequence(tags, True, PAD), lengths


def loss_of(model: Tagger, batch, reduction: str) -> torch.Tensor:
    words, tags, lengths = batch
    return nn.functional.cross_entropy(
        model(words, lengths).flatten(0, 1), tags.flatten(), ignore_index=PAD, reduction=reduction
    )


torch.manual_seed(4)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
train = DataLoader(sentences(80, 0), 10, shuffle=True, collate_fn=collate)
held_out = DataLoader(sentences(33, 1), 10, collate_fn=collate)
progress = {"epoch": 0, "best": float("inf"), "waited": 0}
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    torch.set_rng_state(saved["random"])
    progress = saved["progress"]
while progress["epoch"] < 8 and progress["waited"] < 3:
    model.train()
    for batch in train:
        optimizer.zero_grad()
        loss_of(model, batch, "mean").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = sum(loss_of(model, batch, "sum").item() for batch in held_out)
    loss /= sum(len(words) for words, _ in held_out.dataset)
    schedule.step(loss)
    progress["waited"] = 0 if loss < progress["best"] else progress["waited"] + 1
    progress["best"] = min(loss, progress["best"])
    progress["epoch"] += 1
    relations.report(val_loss=loss)
    if path := relations.save():
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(states | {"random": torch.get_rng_state(), "progress": progress}, path)
