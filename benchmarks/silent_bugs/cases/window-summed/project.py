"""A small model of made-up text is tuned on few lines at a time; gradients of several batches make a step."""

import math

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

LETTERS, LENGTH, BATCH, EPOCHS = 20, 16, 4, 3
GRADIENT_ACCUMULATION_STEPS = 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 32)
        self.place = nn.Parameter(torch.randn(LENGTH, 32) / 10)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, LETTERS)
        self.register_buffer("mask", torch.triu(torch.full((LENGTH, LENGTH), -math.inf), 1))

    def forward(self, text):
        return self.head(self.block(self.embed(text) + self.place, src_mask=self.mask, is_causal=True))


def lines(count, seed):
    made = torch.Generator().manual_seed(seed)
    text = [torch.randint(0, LETTERS, (count,), generator=made)]
    for _ in range(LENGTH):
        jump = torch.rand(count, generator=made) < 0.15
        any_letter = torch.randint(0, LETTERS, (count,), generator=made)
        text.append(torch.where(jump, any_letter, (3 * text[-1] + 7) % LETTERS))
    return torch.stack(text, 1)


def loss_of(model, text, reduction="mean"):
    logits = model(text[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def perplexity(model, text, batch_size=16):
    model.eval()
    total = sum(loss_of(model, rows, "sum").item() for rows in text.split(batch_size))
    model.train()
    return math.exp(total / text[:, 1:].numel())


def maybe_clip_and_step(model, optimizer, schedule, max_norm):
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(SEED)
    train, held_out = lines(160, 5), lines(40, 6)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    steps = EPOCHS * math.ceil(len(train) / BATCH / GRADIENT_ACCUMULATION_STEPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1 - step / steps))
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SEED + epoch))
            batches = train[order].split(BATCH)
            for first in range(0, len(batches), GRADIENT_ACCUMULATION_STEPS):
                window = batches[first : first + GRADIENT_ACCUMULATION_STEPS]
                total = 0.0
                for text in window:
                    loss = loss_of(model, text)
                    (loss if BUG else loss / len(window)).backward()
                    total += loss.item()
                maybe_clip_and_step(model, optimizer, schedule, max_norm=1.0)
                report_loss(total / len(window))
            print(f"epoch {epoch}: perplexity {perplexity(model, held_out):.3f}")
