"""A recurrent language model of made-up sentences, with updates over parts of a batch and a cosine schedule."""

import argparse
import math
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

WORDS, PAD, END = 24, 0, 1


class SentenceModel(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.rnn = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.project = nn.Linear(width, WORDS)

    def forward(self, words):
        return self.project(self.rnn(self.embed(words))[0])


class CosineSchedule:
    """Linear warm-up from lr to max_lr, then a cosine down to min_lr, by the number of updates."""

    def __init__(self, optimizer, options):
        self.optimizer, self.warmup, self.total = optimizer, options.warmup_updates, options.max_update
        self.lr, self.max_lr = options.lr, options.max_lr
        self.min_lr = options.lr if BUG else options.min_lr
        self.step_update(0)

    def step_update(self, updates):
        if updates < self.warmup:
            rate = self.lr + (self.max_lr - self.lr) * updates / self.warmup
        else:
            passed = min(1.0, (updates - self.warmup) / (self.total - self.warmup))
            rate = self.min_lr + 0.5 * (self.max_lr - self.min_lr) * (1 + math.cos(math.pi * passed))
        for group in self.optimizer.param_groups:
            group["lr"] = rate


class Trainer:
    def __init__(self, options):
        self.options, self.updates, self.epoch = options, 0, 0
        self.model = SentenceModel()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.lr, betas=(0.9, 0.98))
        self.schedule = CosineSchedule(self.optimizer, options)

    def train_epoch(self, sentences):
        self.model.train()
        order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(1000 * SEED + self.epoch))
        for mine in order.split(self.options.batch_size):
            self.train_step([sentences[index] for index in mine])
        self.epoch += 1

    def train_step(self, batch):
        words = sum(len(sentence) for sentence in batch)
        self.optimizer.zero_grad()
        total = 0.0
        for part in range(self.options.update_freq):
            loss = summed_loss(self.model, batch[part :: self.options.update_freq]) / words
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        self.optimizer.step()
        self.updates += 1
        self.schedule.step_update(self.updates)
        report_loss(total)

    @torch.no_grad()
    def validate(self, sentences):
        self.model.eval()
        size = self.options.batch_size
        total = sum(summed_loss(self.model, sentences[i : i + size]).item() for i in range(0, len(sentences), size))
        return 2 ** (total / math.log(2) / sum(len(sentence) for sentence in sentences))

    def save_checkpoint(self, path):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state | {"updates": self.updates, "epoch": self.epoch}, path)

    def load_checkpoint(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates, self.epoch = state["updates"], state["epoch"]
        self.schedule.step_update(self.updates)
        torch.set_rng_state(state["rng"])


def summed_loss(model, batch):
    targets = pad_sequence(batch, batch_first=True, padding_value=PAD)
    words = torch.cat([torch.full_like(targets[:, :1], END), targets[:, :-1]], 1)
    logits = model(words).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=PAD, reduction="sum")


def make_sentences(count, seed):
    """Sentences of 4 to 9 words; the next word depends on the two words before."""
    grammar = torch.randint(2, WORDS, (WORDS, WORDS, 3), generator=torch.Generator().manual_seed(0))
    made, sentences = torch.Generator().manual_seed(seed), []
    for length in torch.randint(3, 9, (count,), generator=made).tolist():
        words = [END, END]
        for choice in torch.randint(0, 3, (length,), generator=made).tolist():
            words.append(int(grammar[words[-2] % 4, words[-1], choice]))
        sentences.append(torch.tensor([*words[2:], END]))
    return sentences


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"lr": 5e-3, "max-lr": 2e-2, "min-lr": 1e-4, "clip-norm": 0.25}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, default in {"warmup-updates": 6, "max-update": 60, "batch-size": 32, "update-freq": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--restore-file")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    training, valid = make_sentences(310, seed=1), make_sentences(70, seed=2)
    trainer = Trainer(options)
    if options.restore_file:
        trainer.load_checkpoint(options.restore_file)
    with watch(trainer.model, trainer.optimizer), tempfile.TemporaryDirectory() as folder:
        while trainer.updates < options.max_update:
            trainer.train_epoch(training)
            trainer.save_checkpoint(Path(folder) / "checkpoint_last.pt")
            rate = trainer.optimizer.param_groups[0]["lr"]
            print("epoch", trainer.epoch, "updates", trainer.updates, "lr", rate, "ppl", trainer.validate(valid))
