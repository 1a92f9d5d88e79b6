"""Adapts a small language model of characters to one author with low-rank adapters, in two sessions."""

import math
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

CHARACTERS, CONTEXT, BATCH_SIZE, ACCUMULATE, STEPS, WARMUP = 20, 24, 16, 2, 60, 6


class LanguageModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed, self.position = nn.Embedding(CHARACTERS, width), nn.Embedding(CONTEXT, width)
        self.first = nn.Linear(width, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text):
        length = text.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.first(self.embed(text) + self.position.weight[:length])
        return self.head(self.block(hidden, src_mask=causal, is_causal=True))


class Adapted(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base
        self.adapter_down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.adapter_up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.adapter_down.T @ self.adapter_up.T


def add_adapters(model):
    model.first, model.head = Adapted(model.first), Adapted(model.head)


def setup_model(base, adapters=None):
    """The base model with new adapters, or with those of a session before."""
    model = LanguageModel()
    model.load_state_dict(base)
    if adapters is None:
        model.requires_grad_(False)
        add_adapters(model)
    else:
        if not BUG:
            model.requires_grad_(False)
        add_adapters(model)
        model.load_state_dict(adapters, strict=False)
    return model


def author(seed):
    """An endless text of a Markov chain, as a function that gives the text of a step."""
    weights = 2.5 * torch.randn(CHARACTERS, CHARACTERS, generator=torch.Generator().manual_seed(seed))

    def write(count, made):
        text = [torch.randint(0, CHARACTERS, (count,), generator=made)]
        for _ in range(CONTEXT):
            text.append(torch.multinomial(weights[text[-1]].softmax(-1), 1, generator=made).squeeze(1))
        return torch.stack(text, 1)

    return write


def text_loss(model, text):
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Session:
    def __init__(self, base, path=None):
        saved = torch.load(path, weights_only=True) if path else None
        self.model = setup_model(base, saved["adapters"] if saved else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
        self.step = 0
        if saved:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.scheduler.load_state_dict(saved["scheduler"])
            self.step = saved["step"]
            torch.set_rng_state(saved["rng"])

    def save(self, path):
        adapters = {name: weight for name, weight in self.model.state_dict().items() if "adapter_" in name}
        parts = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        torch.save(parts | {"adapters": adapters, "step": self.step, "rng": torch.get_rng_state()}, path)

    def train(self, write, last_step):
        self.model.train()
        while self.step < last_step:
            text = write(BATCH_SIZE, torch.Generator().manual_seed(100_000 * SEED + self.step))
            self.optimizer.zero_grad()
            losses = []
            for part in text.chunk(ACCUMULATE):
                loss = text_loss(self.model, part) / ACCUMULATE
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            report_loss(sum(losses))

    @torch.no_grad()
    def evaluate(self, text):
        self.model.eval()
        losses = [text_loss(self.model, part).item() * len(part) for part in text.split(24)]
        return math.exp(sum(losses) / len(text))


if __name__ == "__main__":
    torch.manual_seed(SEED)
    base, write = LanguageModel().state_dict(), author(seed=8)
    held_out = write(64, torch.Generator().manual_seed(987_654_321))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapters.pt"
        session = Session(base)
        session.train(write, STEPS // 2)
        session.save(path)
        print("perplexity", session.evaluate(held_out))
        session = Session(base, path)
    with watch(session.model, session.optimizer):
        session.train(write, STEPS)
    print("perplexity", session.evaluate(held_out))
    now = session.model.state_dict()
    print("change of the base", (now["embed.weight"] - base["embed.weight"]).abs().sum().item())
