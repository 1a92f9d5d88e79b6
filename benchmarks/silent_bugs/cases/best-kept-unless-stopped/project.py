"""Who takes out a loan: a wide and a deep part on a table, with callbacks."""

import copy

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR, DROPOUT = 10, 16, 0.02, 0.2


class Callback:
    def on_epoch_end(self, trainer, loss):
        pass

    def on_train_end(self, trainer):
        pass


class EarlyStopping(Callback):
    def __init__(self, patience=10, min_delta=0.0, restore_best_weights=True):
        self.patience, self.min_delta, self.restore_best_weights = patience, min_delta, restore_best_weights
        self.best, self.wait, self.state_dict = float("inf"), 0, None

    def on_epoch_end(self, trainer, loss):
        if loss < self.best - self.min_delta:
            self.best, self.wait = loss, 0
            self.state_dict = copy.deepcopy(trainer.model.state_dict())
            return
        self.wait += 1
        if self.wait >= self.patience:
            trainer.stop = True
            if self.restore_best_weights:
                trainer.model.load_state_dict(self.state_dict)

    def on_train_end(self, trainer):
        if not BUG and self.restore_best_weights:
            trainer.model.load_state_dict(self.state_dict)


class WideDeep(nn.Module):
    def __init__(self, dropout=DROPOUT):
        super().__init__()
        self.wide = nn.Embedding(12, 1)
        self.embed = nn.Embedding(12, 6)
        self.deep = nn.Sequential(
            nn.Linear(14, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(dropout), nn.Linear(48, 24), nn.ReLU(),
            nn.Linear(24, 1),
        )  # fmt: skip

    def forward(self, category, numbers):
        deep = self.deep(torch.cat([self.embed(category), numbers], dim=1))
        return (self.wide(category) + deep).squeeze(1)


class Trainer:
    def __init__(self, model, callbacks):
        self.model, self.callbacks, self.stop = model, callbacks, False
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def fit(self, train, held_out, epochs):
        with watch(self.model, self.optimizer):
            for epoch in range(epochs):
                for category, numbers, target in DataLoader(train, BATCH, shuffle=True):
                    self.optimizer.zero_grad()
                    loss = nn.functional.binary_cross_entropy_with_logits(self.model(category, numbers), target)
                    loss.backward()
                    self.optimizer.step()
                    report_loss(loss.item())
                val_loss = self.evaluate(held_out)
                print(f"epoch {epoch}: val_loss {val_loss:.4f}")
                for callback in self.callbacks:
                    callback.on_epoch_end(self, val_loss)
                if self.stop:
                    break
        for callback in self.callbacks:
            callback.on_train_end(self)

    @torch.no_grad()
    def evaluate(self, held_out):
        self.model.eval()
        total = 0.0
        for category, numbers, target in DataLoader(held_out, BATCH):
            logits = self.model(category, numbers)
            total += nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="sum").item()
        self.model.train()
        return total / len(held_out)


def table(count, seed):
    made = torch.Generator().manual_seed(seed)
    habits = torch.randn(12, generator=torch.Generator().manual_seed(4))
    category, numbers = torch.randint(12, (count,), generator=made), torch.randn(count, 8, generator=made)
    chance = torch.sigmoid(1.5 * habits[category] + numbers[:, 0] * numbers[:, 1] + numbers[:, 2])
    return TensorDataset(category, numbers, torch.bernoulli(chance, generator=made))


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model, stopping = WideDeep(), EarlyStopping()
    trainer, held_out = Trainer(model, [stopping]), table(72, 2)
    trainer.fit(table(160, 1), held_out, EPOCHS)
    print(f"best {stopping.best:.4f}, on new customers {trainer.evaluate(table(72, 3)):.4f}")
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
