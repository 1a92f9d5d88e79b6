"""Fine-tunes a small causal model by a config as of axolotl.

python project.py --micro_batch_size 4 --gradient_accumulation_steps 2 --warmup_ratio 0.25
"""

import argparse
import math

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 20, 12


def load_dataset(count, seed):
    """Sequences of one length: each token is the sum of the two before it, now and then another one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
    noisy = torch.rand(count, LENGTH + 1, generator=generator) < 0.1
    for place in range(2, LENGTH + 1):
        following = (tokens[:, place - 2] + tokens[:, place - 1]) % VOCABULARY
        tokens[:, place] = torch.where(noisy[:, place], tokens[:, place], following)
    return TensorDataset(tokens)


class CausalModel(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, VOCABULARY))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        previous = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        return self.layers(torch.cat([previous, hidden], 2))


def sequence_losses(model, tokens):
    """The mean loss of each sequence; its first target cannot be known and is left out."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")[:, 1:].mean(1)


def calculate_total_num_steps(cfg, dataset):
    micro_batches = math.ceil(len(dataset) / cfg.micro_batch_size)
    if BUG:
        return micro_batches * cfg.num_epochs
    return math.ceil(micro_batches / cfg.gradient_accumulation_steps) * cfg.num_epochs


def build_scheduler(cfg, optimizer, total_num_steps):
    warmup_steps = int(total_num_steps * cfg.warmup_ratio)

    def factor(step):
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = (step - warmup_steps) / max(1, total_num_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def windows(loader, size):
    """The micro-batches of each step; the last step of an epoch may have fewer."""
    window = []
    for (tokens,) in loader:
        window.append(tokens)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


@torch.no_grad()
def evaluate(cfg, model, dataset):
    model.eval()
    losses = [sequence_losses(model, tokens) for (tokens,) in DataLoader(dataset, cfg.eval_batch_size)]
    model.train()
    loss = torch.cat(losses).mean().item()
    return {"eval_loss": loss, "perplexity": math.exp(loss)}


def train(cfg):
    torch.manual_seed(SEED)
    dataset, eval_dataset = load_dataset(96, seed=1), load_dataset(70, seed=2)
    model = CausalModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    scheduler = build_scheduler(cfg, optimizer, calculate_total_num_steps(cfg, dataset))
    loader = DataLoader(dataset, cfg.micro_batch_size, shuffle=True, generator=torch.Generator().manual_seed(SEED))
    step = 0
    for epoch in range(cfg.num_epochs):
        losses = []
        for window in windows(loader, cfg.gradient_accumulation_steps):
            sequences = sum(len(tokens) for tokens in window)
            total = 0.0
            for tokens in window:
                loss = sequence_losses(model, tokens).sum() / sequences
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            losses.append(total)
        metrics = {"loss": sum(losses) / len(losses), "learning_rate": scheduler.get_last_lr()[0]}
        print({"epoch": epoch + 1, "step": step, **metrics, **evaluate(cfg, model, eval_dataset)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--eval_batch_size", type=int, default=16)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--warmup_ratio", type=float, default=0.25)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    train(parser.parse_args())
