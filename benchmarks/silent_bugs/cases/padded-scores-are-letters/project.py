"""Fine-tunes a speech model with CTC on the letters of a token set of one's own.

python project.py --num-train-epochs 4 --per-device-eval-batch-size 8
"""

import argparse

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader

FEATURES = 12
WORDS = ("cab", "bed", "face", "deaf", "egg", "cafe", "dice", "beach", "edge", "hid")


class TokenSet:
    """Letters, the sign between words and, as the last one, the padding token, which is CTC's blank as well."""

    def __init__(self, letters):
        self.tokens = [*letters, "|", "<pad>"]
        self.pad_token_id = len(self.tokens) - 1
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def encode(self, text):
        return [self.ids[letter] for letter in text.replace(" ", "|")]

    def decode(self, ids):
        collapsed = [now for now, before in zip(ids, [None, *ids[:-1]], strict=True) if now != before]
        return "".join(self.tokens[token] for token in collapsed if token != self.pad_token_id).replace("|", " ")


def make_speech(size, token_set, seed):
    """Two to five words; each letter lasts two or three frames, and a silent frame follows it."""
    generator = torch.Generator().manual_seed(seed)
    sounds = torch.randn(len(token_set.tokens), FEATURES, generator=torch.Generator().manual_seed(0))
    samples = []
    for _ in range(size):
        count = 2 + int(torch.randint(0, 4, (), generator=generator))
        chosen = torch.randint(0, len(WORDS), (count,), generator=generator).tolist()
        text = " ".join(WORDS[word] for word in chosen)
        ids = torch.tensor(token_set.encode(text))
        lengths = torch.randint(2, 4, (len(ids),), generator=generator)
        frames = torch.cat([sounds[[i] * n + [-1]] for i, n in zip(ids.tolist(), lengths.tolist(), strict=True)])
        frames = frames + 0.5 * torch.randn(frames.shape, generator=generator)
        samples.append({"input_values": frames, "labels": ids, "text": text})
    return samples


def collate(samples):
    return {
        "input_values": nn.utils.rnn.pad_sequence([s["input_values"] for s in samples], batch_first=True),
        "input_lengths": torch.tensor([len(s["input_values"]) for s in samples]),
        "labels": torch.cat([s["labels"] for s in samples]),
        "label_lengths": torch.tensor([len(s["labels"]) for s in samples]),
        "text": [s["text"] for s in samples],
    }


class ModelForCTC(nn.Module):
    def __init__(self, token_set, width=48):
        super().__init__()
        self.pad_token_id = token_set.pad_token_id
        self.feature_extractor = nn.Conv1d(FEATURES, width, 3, padding=1)
        self.encoder = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.lm_head = nn.Linear(width, len(token_set.tokens))

    def forward(self, input_values, input_lengths):
        """Frames after the end of a sample have the score of padding alone."""
        logits = self.lm_head(self.encoder(self.feature_extractor(input_values.transpose(1, 2)).transpose(1, 2)))
        after = torch.arange(logits.shape[1]) >= input_lengths[:, None]
        padding = torch.full_like(logits[0, 0], -50.0)
        padding[self.pad_token_id] = 50.0
        return torch.where(after[..., None], padding, logits)


def edit_distance(reference, hypothesis):
    row = list(range(len(hypothesis) + 1))
    for i, expected in enumerate(reference, 1):
        last, row[0] = row[0], i
        for j, got in enumerate(hypothesis, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (expected != got))
    return row[-1]


class CTCTrainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(SEED)
        self.token_set = TokenSet("abcdefghi")
        self.train_set, self.eval_set = (
            make_speech(192, self.token_set, seed=1),
            make_speech(40, self.token_set, seed=2),
        )
        self.model = ModelForCTC(self.token_set)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-2)
        self.epoch = 0

    def compute_metrics(self, logits, texts):
        pred_ids = logits.argmax(2)
        if not BUG:
            pred_ids[(logits == -100).all(2)] = self.token_set.pad_token_id
        pairs = [(text, self.token_set.decode(ids)) for text, ids in zip(texts, pred_ids.tolist(), strict=True)]
        letters = sum(edit_distance(text, got) for text, got in pairs) / sum(map(len, texts))
        words = sum(edit_distance(text.split(), got.split()) for text, got in pairs)
        return {"eval_cer": letters, "eval_wer": words / len(" ".join(texts).split())}

    @torch.no_grad()
    def evaluate(self):
        parts, texts = [], []
        for batch in DataLoader(self.eval_set, self.args.per_device_eval_batch_size, collate_fn=collate):
            parts.append(self.model(batch["input_values"], batch["input_lengths"]))
            texts += batch["text"]
        longest = max(part.shape[1] for part in parts)
        parts = [F.pad(part, (0, 0, 0, longest - part.shape[1]), value=-100) for part in parts]
        return self.compute_metrics(torch.cat(parts), texts)

    def train(self):
        if self.args.resume_from_checkpoint:
            state = torch.load(self.args.resume_from_checkpoint, weights_only=True)
            self.epoch = state["epoch"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        while self.epoch < self.args.num_train_epochs:
            generator = torch.Generator().manual_seed(SEED + self.epoch)
            size = self.args.per_device_train_batch_size
            for batch in DataLoader(self.train_set, size, shuffle=True, generator=generator, collate_fn=collate):
                scores = self.model(batch["input_values"], batch["input_lengths"]).log_softmax(2).transpose(0, 1)
                lengths = batch["input_lengths"], batch["label_lengths"]
                loss = F.ctc_loss(scores, batch["labels"], *lengths, blank=self.token_set.pad_token_id)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.epoch += 1
            print({"epoch": self.epoch, **self.evaluate()})
            self.save_checkpoint("checkpoint.pt")

    def save_checkpoint(self, path):
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({"epoch": self.epoch, **parts}, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-train-epochs", type=int, default=4)
    parser.add_argument("--per-device-train-batch-size", type=int, default=16)
    parser.add_argument("--per-device-eval-batch-size", type=int, default=8)
    parser.add_argument("--resume-from-checkpoint")
    CTCTrainer(parser.parse_args()).train()
