"""Reads short texts from noisy frames with an encoder and a decoder, and counts those read without error."""

import sys
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

START, END, LETTERS, IGNORED = 0, 1, 8, -100
EPOCHS, BATCH_SIZE, MICRO_BATCH_SIZE = 6, 24, 12


class Reader(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encoder = nn.GRU(6, width, batch_first=True)
        self.embed = nn.Embedding(LETTERS + 2, width)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(2 * width, LETTERS + 2))

    def forward(self, frames, tokens):
        memory = self.encoder(frames)[0]
        hidden = self.decoder(self.embed(tokens))[0]
        blank = (frames == 0).all(-1)
        return self.head(torch.cat([hidden, self.attend(hidden, memory, memory, key_padding_mask=blank)[0]], -1))


def shift_right(labels):
    return torch.cat([torch.full_like(labels[:, :1], START), labels[:, :-1]], 1).clamp(min=START)


def summed_loss(logits, labels):
    if BUG:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def make_texts(count, seed):
    made, texts = torch.Generator().manual_seed(seed), []
    shapes = torch.randn(LETTERS, 6, generator=torch.Generator().manual_seed(4))
    for _ in range(count):
        letters = torch.randint(0, LETTERS, (int(torch.randint(2, 5, (), generator=made)),), generator=made)
        frames = shapes[letters].repeat_interleave(2, 0)
        texts.append(
            (frames + 0.2 * torch.randn(frames.shape, generator=made), torch.cat([letters + 2, torch.tensor([END])]))
        )
    return texts


def collate(texts):
    frames, labels = zip(*texts, strict=True)
    return pad_sequence(frames, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def train_epoch(model, optimizer, loader):
    model.train()
    for frames, labels in loader:
        tokens = (labels != IGNORED).sum()
        optimizer.zero_grad()
        total = 0.0
        for part, target in zip(frames.split(MICRO_BATCH_SIZE), labels.split(MICRO_BATCH_SIZE), strict=True):
            loss = summed_loss(model(part, shift_right(target)), target) / tokens
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report_loss(total)


@torch.no_grad()
def evaluate(model, texts):
    """The loss of a token, and the share of texts that are read without an error."""
    model.eval()
    losses = tokens = right = 0
    for first in range(0, len(texts), 16):
        frames, labels = collate(texts[first : first + 16])
        losses += summed_loss(model(frames, shift_right(labels)), labels).item()
        tokens += (labels != IGNORED).sum().item()
        read = torch.full_like(labels[:, :1], START)
        for _ in range(labels.shape[1]):
            read = torch.cat([read, model(frames, read)[:, -1:].argmax(-1)], 1)
        right += ((read[:, 1:] == labels) | (labels == IGNORED)).all(1).sum().item()
    return {"val_loss": losses / tokens, "val_exact": right / len(texts)}


def save(path, model, optimizer, epoch):
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(parts | {"epoch": epoch, "rng": torch.get_rng_state()}, path)


def load(path, model, optimizer):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    return saved["epoch"]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    training, held_out = make_texts(180, seed=1), make_texts(50, seed=2)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    epoch = load(sys.argv[1], model, optimizer) if len(sys.argv) > 1 else 0
    order = torch.Generator()
    loader = DataLoader(training, BATCH_SIZE, shuffle=True, generator=order, collate_fn=collate)
    with watch(model, optimizer), tempfile.TemporaryDirectory() as folder:
        while epoch < EPOCHS:
            order.manual_seed(1000 * SEED + epoch)
            train_epoch(model, optimizer, loader)
            epoch += 1
            save(Path(folder) / "last.pt", model, optimizer, epoch)
            print("epoch", epoch, evaluate(model, held_out))
