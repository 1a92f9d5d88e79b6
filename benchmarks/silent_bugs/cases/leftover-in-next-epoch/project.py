"""A small causal language model on made-up sentences, with the trainer of a larger library in miniature."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH = 16, 13, 24


class LanguageModel(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, sentences):
        seen, following = sentences[:, :-1], sentences[:, 1:]
        x = self.tokens(seen) + self.places.weight[: seen.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1])
        logits = self.head(self.block(x, src_mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def sentences(count, seed):
    made = torch.Generator().manual_seed(seed)
    step = torch.randint(1, 4, (count, 1), generator=made)
    start = torch.randint(VOCABULARY, (count, 1), generator=made)
    exact = (start + step * torch.arange(LENGTH)) % VOCABULARY
    noise = torch.randint(VOCABULARY, exact.shape, generator=made)
    return TensorDataset(torch.where(torch.rand(exact.shape, generator=made) < 0.1, noise, exact))


class Trainer:
    def __init__(self, lr=0.01, epochs=9, batch=4, gradient_accumulation_steps=4, max_grad_norm=2.0, dropout=0.1):
        torch.manual_seed(SEED)
        self.epochs, self.batch, self.epoch = epochs, batch, 0
        self.gradient_accumulation_steps, self.max_grad_norm = gradient_accumulation_steps, max_grad_norm
        self.model = LanguageModel(dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 1 - epoch / epochs)
        self.train_data, self.eval_data = sentences(56, 1), sentences(30, 2)

    def save_checkpoint(self, path):
        states = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        torch.save({**states, "epoch": self.epoch, "rng": torch.get_rng_state()}, path)

    def load_checkpoint(self, path):
        saved = torch.load(path, weights_only=True)
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(saved[name])
        self.epoch = saved["epoch"]
        torch.set_rng_state(saved["rng"])

    def train(self, until):
        while self.epoch < until:
            loader = DataLoader(self.train_data, self.batch, shuffle=True)
            for step, (batch,) in enumerate(loader):
                whole = self.gradient_accumulation_steps
                window = whole if BUG else min(whole, len(loader) - step // whole * whole)
                loss = self.model(batch)
                (loss / window).backward()
                report_loss(loss.item())
                if (step + 1) % whole == 0 or (not BUG and step + 1 == len(loader)):
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self.scheduler.step()
            self.epoch += 1
            print(f"epoch {self.epoch}: eval loss {self.evaluate():.4f}")

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        total = sum(self.model(batch).item() * len(batch) for (batch,) in DataLoader(self.eval_data, 8))
        self.model.train()
        return total / len(self.eval_data)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        trainer = Trainer()
        with watch(trainer.model, trainer.optimizer):
            trainer.train(5)
        trainer.save_checkpoint(path)
        trainer = Trainer()
        trainer.load_checkpoint(path)
    with watch(trainer.model, trainer.optimizer):
        trainer.train(trainer.epochs)
    print("weights", sum(weight.abs().sum().item() for weight in trainer.model.parameters()))
