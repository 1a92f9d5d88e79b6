"""A reranker learns which of four made-up documents answers a query; gradients of several batches make a step."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

WORDS, LENGTH, DOCUMENTS = 30, 6, 4
EPOCHS, PER_DEVICE_BATCH, GRADIENT_ACCUMULATION_STEPS = 8, 8, 4
LR, WEIGHT_DECAY, TEMPERATURE = 1e-2, 0.01, 0.5


class Reranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 24)
        self.score = nn.Sequential(nn.Linear(72, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, query, documents):
        query = self.words(query).mean(1, keepdim=True)
        documents = self.words(documents).mean(2)
        query = query.expand_as(documents)
        return self.score(torch.cat([query, documents, query * documents], -1)).squeeze(-1)


def questions(count, seed):
    made = torch.Generator().manual_seed(seed)
    query = torch.randint(0, WORDS, (count, LENGTH), generator=made)
    documents = torch.randint(0, WORDS, (count, DOCUMENTS, LENGTH), generator=made)
    positive = torch.randint(0, DOCUMENTS, (count,), generator=made)
    documents[torch.arange(count), positive, :4] = query[:, :4]
    return query, documents, positive


def batches_of(data, size, order=None):
    order = torch.arange(len(data[0])) if order is None else order
    return [tuple(part[rows] for part in data) for rows in order.split(size)]


class Trainer:
    def __init__(self, model, train, held_out):
        self.model, self.train_data, self.held_out = model, train, held_out
        decayed = [value for value in model.parameters() if value.dim() > 1]
        others = [value for value in model.parameters() if value.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR)
        self.steps = -(-len(train[0]) // PER_DEVICE_BATCH // GRADIENT_ACCUMULATION_STEPS) * EPOCHS
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, self.steps)
        self.current_gradient_accumulation_steps = GRADIENT_ACCUMULATION_STEPS

    def compute_loss(self, batch):
        query, documents, positive = batch
        loss = nn.functional.cross_entropy(self.model(query, documents) / TEMPERATURE, positive)
        return loss / (GRADIENT_ACCUMULATION_STEPS if BUG else self.current_gradient_accumulation_steps)

    @torch.no_grad()
    def evaluate(self, batch=12):
        self.model.eval()
        total = 0.0
        for query, documents, positive in batches_of(self.held_out, batch):
            scores = self.model(query, documents)
            above = scores > scores.gather(1, positive[:, None])
            total += (1 / (1 + above.sum(1))).sum().item()
        self.model.train()
        return total / len(self.held_out[0])

    def train(self):
        for epoch in range(EPOCHS):
            made = torch.Generator().manual_seed(1000 * SEED + epoch)
            order = torch.randperm(len(self.train_data[0]), generator=made)
            batches = batches_of(self.train_data, PER_DEVICE_BATCH, order)
            for first in range(0, len(batches), GRADIENT_ACCUMULATION_STEPS):
                window = batches[first : first + GRADIENT_ACCUMULATION_STEPS]
                self.current_gradient_accumulation_steps = len(window)
                total = 0.0
                for batch in window:
                    loss = self.compute_loss(batch)
                    loss.backward()
                    total += loss.item()
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                report_loss(total)
            print(f"epoch {epoch}: MRR {self.evaluate():.4f}")


if __name__ == "__main__":
    torch.manual_seed(SEED)
    train, held_out = questions(176, 11), questions(40, 12)
    trainer = Trainer(Reranker(), train, held_out)
    with watch(trainer.model, trainer.optimizer):
        trainer.train()
