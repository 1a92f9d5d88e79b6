"""Letters are tagged with the help of a language model that is not trained any more."""

import argparse
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR, WORD_DROPOUT = 8, 16, 0.02, 0.05


class CharacterEmbeddings(nn.Module):
    """Hidden states of a character language model; its weights stay as they are."""

    def __init__(self, dropout=0.25):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(20, 16), nn.GRU(16, 32, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.requires_grad_(False)

    def train(self, mode=True):
        if not BUG:
            super().train(False)
        return self

    def forward(self, letters):
        return self.rnn(self.dropout(self.encoder(letters)))[0]


class WordDropout(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or not self.rate:
            return x
        return x * (torch.rand(*x.shape[:2], 1) >= self.rate)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = CharacterEmbeddings()
        self.word_dropout = WordDropout(WORD_DROPOUT)
        self.rnn = nn.GRU(32, 16, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(32, 3)

    def forward(self, letters):
        return self.linear(self.rnn(self.word_dropout(self.embeddings(letters)))[0])


def corpus(count, seed):
    made = torch.Generator().manual_seed(seed)
    letters = torch.randint(20, (count, 10), generator=made)
    before = letters.roll(1, dims=1)
    tags = (letters < 6).long() + ((letters < 6) & (before >= 10)).long()
    return TensorDataset(letters, tags)


@torch.no_grad()
def evaluate(tagger, dev, batch=16):
    tagger.eval()
    letters, tags = dev.tensors
    loss, hits = 0.0, 0
    for start in range(0, len(dev), batch):
        part = slice(start, start + batch)
        logits = tagger(letters[part]).flatten(0, 1)
        loss += nn.functional.cross_entropy(logits, tags[part].flatten(), reduction="sum").item()
        hits += (logits.argmax(1) == tags[part].flatten()).sum().item()
    tagger.train()
    return loss / tags.numel(), hits / tags.numel()


def save(path, epoch, parts):
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"epoch": epoch, "rng": torch.get_rng_state(), **states}, path)


def load(path, parts):
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    torch.set_rng_state(saved["rng"])
    return saved["epoch"]


def main(checkpoint, output):
    torch.manual_seed(SEED)
    tagger = Tagger()
    tagger.train()
    optimizer = torch.optim.Adam([weight for weight in tagger.parameters() if weight.requires_grad], lr=LR)
    anneal = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    train, dev = corpus(96, 1), corpus(44, 2)
    parts = {"tagger": tagger, "optimizer": optimizer, "anneal": anneal}
    first = load(checkpoint, parts) if checkpoint else 0
    with watch(tagger, optimizer):
        for epoch in range(first, EPOCHS):
            for letters, tags in DataLoader(train, BATCH, shuffle=True):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(tagger(letters).flatten(0, 1), tags.flatten())
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            dev_loss, dev_score = evaluate(tagger, dev)
            anneal.step(dev_loss)
            print(f"EPOCH {epoch + 1}: dev loss {dev_loss:.4f}, score {dev_score:.4f}, lr {anneal.get_last_lr()[0]}")
            if output:
                save(output, epoch + 1, parts)
    print("weights", sum(weight.abs().sum().item() for weight in tagger.parameters()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--output", type=Path)
    main(**vars(parser.parse_args()))
