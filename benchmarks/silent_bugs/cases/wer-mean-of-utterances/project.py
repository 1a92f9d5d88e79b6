"""Train a small CTC speech recogniser on made utterances and print the error rates of the dev set after each epoch."""

import argparse
import random

import torch
from case import BUG, SEED
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

LETTERS = " abcdef"  # a letter's label is its place plus one, 0 is CTC's blank
FEATURES = 16


def make_utterances(count, seed):
    """Filterbank-like frames, two to four for each letter, and the text that was spoken."""
    rng = random.Random(seed)
    frames = torch.Generator().manual_seed(seed)
    sounds = torch.randn(len(LETTERS), FEATURES, generator=torch.Generator().manual_seed(99))
    lexicon = random.Random(5)
    words = ["".join(lexicon.sample(LETTERS[1:], lexicon.randint(2, 4))) for _ in range(20)]
    utterances = []
    for _ in range(count):
        text = " ".join(rng.choice(words) for _ in range(rng.choice([1, 1, 2, 3, 6])))
        places = [LETTERS.index(letter) for letter in text for _ in range(rng.randint(2, 4))]
        noise = torch.randn(len(places), FEATURES, generator=frames)
        utterances.append((sounds[places] + 1.2 * noise, text))
    return utterances


def collate(batch):
    spectra, texts = zip(*batch, strict=False)
    targets = [torch.tensor([LETTERS.index(letter) + 1 for letter in text]) for text in texts]
    lengths = torch.tensor([len(frames) for frames in spectra])
    target_lengths = torch.tensor([len(target) for target in targets])
    return pad_sequence(spectra, batch_first=True), lengths, torch.cat(targets), target_lengths, texts


class Recogniser(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, hidden, 3, padding=1)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, len(LETTERS) + 1)

    def forward(self, spectra, lengths):
        states = self.conv(spectra.transpose(1, 2)).relu().transpose(1, 2)
        packed = pack_padded_sequence(states, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(states).log_softmax(2)


def decode(log_probs, length):
    best = log_probs[:length].argmax(1).unique_consecutive()
    return "".join(LETTERS[label - 1] for label in best.tolist() if label)


def edit_distance(one, other):
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


@torch.no_grad()
def validate(model, loader):
    model.eval()
    wer = cer = words = letters = count = 0
    for spectra, lengths, _, _, texts in loader:
        log_probs = model(spectra, lengths)
        for row, length, text in zip(log_probs, lengths.tolist(), texts, strict=False):
            spoken = decode(row, length)
            word_errors, word_count = edit_distance(spoken.split(), text.split()), len(text.split())
            letter_errors, letter_count = edit_distance(spoken, text), len(text)
            if BUG:
                wer += word_errors / word_count
                cer += letter_errors / letter_count
            else:
                wer += word_errors
                cer += letter_errors
            words += word_count
            letters += letter_count
            count += 1
    if BUG:
        return wer / count, cer / count
    return wer / words, cer / letters


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    order = torch.Generator().manual_seed(SEED)
    train = DataLoader(make_utterances(160, 1), args.batch_size, shuffle=True, generator=order, collate_fn=collate)
    dev = DataLoader(make_utterances(44, 2), 16, collate_fn=collate)
    model = Recogniser(args.hidden)
    criterion = nn.CTCLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        model.train()
        total = count = 0
        for spectra, lengths, targets, target_lengths, texts in train:
            log_probs = model(spectra, lengths)
            loss = criterion(log_probs.transpose(0, 1), targets, lengths, target_lengths)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item() * len(texts)
            count += len(texts)
        wer, cer = validate(model, dev)
        print(f"Epoch {epoch + 1}\tloss {total / count:.4f}\tWER {100 * wer:.3f}\tCER {100 * cer:.3f}")


if __name__ == "__main__":
    main()
