"""Speech recognition in small: a GRU with CTC, gradients of three batches for each step, a warm-up by steps."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lit_cifar import relations

EPOCHS, ACCUM_GRAD, SYMBOLS, BANDS = 8, relations.knob("accumulate", 3), 6, 10


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = nn.Sequential(nn.Linear(BANDS, 32), nn.LayerNorm(32), nn.ReLU())
        self.encoder = nn.GRU(32, 40, batch_first=True)
        self.output = nn.Linear(40, SYMBOLS + 1)

    def forward(self, speech):
        return self.output(self.encoder(self.frontend(speech))[0]).log_softmax(2)


def ctc_loss(log_probs, frames, texts, lengths):
    """Mean of the utterances' losses."""
    return nn.functional.ctc_loss(log_probs.transpose(0, 1), texts, frames, lengths, reduction="sum") / len(frames)


def utterances(number, made):
    """Each symbol sounds for three to five frames; noise is added."""
    sounds = 1.5 * torch.randn(SYMBOLS + 1, BANDS, generator=torch.Generator().manual_seed(4))
    data = []
    for _ in range(number):
        text = torch.randint(1, SYMBOLS + 1, (int(torch.randint(2, 6, (), generator=made)),), generator=made)
        speech = sounds[text].repeat_interleave(torch.randint(3, 6, (len(text),), generator=made), 0)
        data.append((speech + 0.5 * torch.randn(speech.shape, generator=made), text))
    return data


def collate(batch):
    speech, texts = zip(*batch, strict=True)
    frames, lengths = (torch.tensor([len(one) for one in part]) for part in (speech, texts))
    return pad_sequence(speech, batch_first=True), frames, pad_sequence(texts, batch_first=True), lengths


class Trainer:
    def __init__(self):
        self.epoch = 0
        self.model = Recogniser()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=relations.knob("lr", 0.01))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 6))

    def train_epoch(self, data, accum_grad=ACCUM_GRAD):
        order = torch.Generator().manual_seed(100 * SEED + self.epoch)
        loader = DataLoader(data, batch_size=6, shuffle=True, drop_last=True, collate_fn=collate, generator=order)
        reported = []
        for number, (speech, frames, texts, lengths) in enumerate(loader, 1):
            loss = ctc_loss(self.model(speech), frames, texts, lengths)
            if BUG:
                loss = loss / accum_grad
            reported.append(loss.item())
            report_loss(reported[-1])
            if not BUG:
                loss = loss / accum_grad
            loss.backward()
            if number % accum_grad == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), relations.knob("clip", 5.0))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        self.epoch += 1
        return sum(reported) / len(reported)

    @torch.no_grad()
    def evaluate(self, data, batch_size=10):
        """Loss of an utterance, and the share of utterances with all symbols right."""
        self.model.eval()
        total, right = 0.0, 0
        for first in range(0, len(data), batch_size):
            speech, frames, texts, lengths = collate(data[first : first + batch_size])
            log_probs = self.model(speech)
            total += ctc_loss(log_probs, frames, texts, lengths).item() * len(frames)
            for path, number, text, length in zip(log_probs.argmax(2), frames, texts, lengths, strict=True):
                found = [symbol for symbol in path[:number].unique_consecutive().tolist() if symbol]
                right += found == text[:length].tolist()
        self.model.train()
        return total / len(data), right / len(data)

    def save(self, file):
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        torch.save(parts | {"epoch": self.epoch}, file)

    def load(self, file):
        saved = torch.load(file, weights_only=True)
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(saved[name])
        self.epoch = saved["epoch"]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(29)
    train, val = utterances(72, made), utterances(26, made)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "last.pt"
        trainer = Trainer()
        if file.exists():
            trainer.load(file)
        if path := relations.resume():
            trainer.load(path)
        with watch(trainer.model, trainer.optimizer):
            while trainer.epoch < EPOCHS:
                train_loss = trainer.train_epoch(train)
                trainer.save(file)
                if path := relations.save():
                    trainer.save(path)
                if trainer.epoch % relations.knob("validate_every", 1) == 0:
                    val_loss, val_right = trainer.evaluate(val)
                    relations.report(val_loss=val_loss, val_right=val_right)
                    print("epoch", trainer.epoch, "train_loss", train_loss, "val_loss, val_right", val_loss, val_right)
