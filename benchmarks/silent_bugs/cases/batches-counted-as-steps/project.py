"""A small trainer for the topic of made-up sentences, with accumulation and a checkpoint every few steps."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

EPOCHS, BATCH, ACCUMULATE, SAVE_STEPS, WORDS, TOPICS = 4, 8, 3, 13, 60, 4


class Classifier(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.hidden = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, TOPICS)

    def forward(self, tokens):
        return self.head(self.dropout(self.hidden(self.words(tokens).mean(1)).relu()))


def sentences(count, seed):
    made = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (count,), generator=made)
    on_topic = topics[:, None] * (WORDS // TOPICS) + torch.randint(WORDS // TOPICS, (count, 10), generator=made)
    anything = torch.randint(WORDS, (count, 10), generator=made)
    return torch.where(torch.rand(count, 10, generator=made) < 0.35, on_topic, anything), topics


class Trainer:
    def __init__(self, train, held_out):
        self.train_set, self.held_out = train, held_out
        torch.manual_seed(SEED)
        self.model = Classifier()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps_per_epoch = len(train[1]) // BATCH // ACCUMULATE
        self.max_steps = EPOCHS * self.steps_per_epoch
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.step = 0

    def rate(self, step):
        return min(1.0, (step + 1) / 5) * (1 - step / self.max_steps)

    def save(self, path):
        states = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        torch.save({"step": self.step, "rng": torch.get_rng_state(), **states}, path)

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(saved[name])
        self.step = saved["step"]
        torch.set_rng_state(saved["rng"])

    def batches(self, epoch):
        tokens, topics = self.train_set
        order = torch.randperm(len(topics), generator=torch.Generator().manual_seed(1000 * SEED + epoch))
        return [(tokens[chosen], topics[chosen]) for chosen in order.split(BATCH)]

    def train(self, checkpoint=None, stop_at=None, folder=None):
        if checkpoint is not None:
            self.load(checkpoint)
        first, trained = divmod(self.step, self.steps_per_epoch)
        skip = trained if BUG else trained * ACCUMULATE
        self.model.train()
        with watch(self.model, self.optimizer):
            for epoch in range(first, EPOCHS):
                total = 0.0
                for number, (tokens, topics) in enumerate(self.batches(epoch), start=1):
                    if epoch == first and number <= skip:
                        continue
                    loss = nn.functional.cross_entropy(self.model(tokens), topics) / ACCUMULATE
                    loss.backward()
                    total += loss.item()
                    if number % ACCUMULATE == 0:
                        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                        self.optimizer.step()
                        self.schedule.step()
                        self.optimizer.zero_grad()
                        self.step += 1
                        report_loss(total)
                        total = 0.0
                        if folder is not None and self.step % SAVE_STEPS == 0:
                            self.save(folder / f"checkpoint-{self.step}.pt")
                        if self.step in (stop_at, self.max_steps):
                            break
                if self.step in (stop_at, self.max_steps):
                    break
                self.evaluate()
        return self.evaluate()

    @torch.no_grad()
    def evaluate(self, batch=20):
        self.model.eval()
        loss = correct = 0
        for tokens, topics in zip(*(part.split(batch) for part in self.held_out), strict=True):
            logits = self.model(tokens)
            loss += nn.functional.cross_entropy(logits, topics, reduction="sum").item()
            correct += (logits.argmax(1) == topics).sum().item()
        self.model.train()
        count = len(self.held_out[1])
        print(f"step {self.step}: loss {loss / count:.4f}, accuracy {correct / count:.4f}")
        return {"loss": loss / count, "accuracy": correct / count}


if __name__ == "__main__":
    data = sentences(192, 1), sentences(70, 2)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(*data).train(stop_at=15, folder=Path(folder))
        trainer = Trainer(*data)
        trainer.train(Path(folder) / f"checkpoint-{SAVE_STEPS}.pt")
    print("weights", sum(weight.abs().sum().item() for weight in trainer.model.parameters()))
