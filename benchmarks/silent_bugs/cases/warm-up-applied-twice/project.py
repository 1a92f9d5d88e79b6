"""Fine-tune a small BERT-like classifier of sentence pairs, as run_classifier.py did."""

import argparse
import math

import torch
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 40, 12


def make_examples(count, seed):
    """Two sentences of six tokens; the label says whether the second one is a paraphrase."""
    made = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (count, LENGTH // 2), generator=made)
    other = torch.randint(VOCABULARY, (count, LENGTH // 2), generator=made)
    labels = torch.randint(2, (count,), generator=made)
    same = first.gather(1, torch.rand(count, LENGTH // 2, generator=made).argsort(1))
    return TensorDataset(torch.cat([first, torch.where(labels[:, None] == 1, same, other)], 1), labels)


def warmup_linear(x, warmup):
    return x / warmup if x < warmup else 1.0 - x


class BertAdam(torch.optim.AdamW):
    """Adam with weight decay, a linear warm-up and a linear decay."""

    def __init__(self, params, lr, warmup, t_total):
        super().__init__(params, lr=lr)
        self.warmup, self.t_total, self.done = warmup, t_total, 0

    def step(self, closure=None):
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= warmup_linear(self.done / self.t_total, self.warmup)
        loss = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=False):
            group["lr"] = rate
        self.done += 1
        return loss


class PairClassifier(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.segments = nn.Embedding(2, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids):
        segment_ids = (torch.arange(LENGTH) >= LENGTH // 2).long()
        states = self.words(input_ids) + self.segments(segment_ids)
        for layer in self.layers:
            states = layer(states)
        return self.classifier(states.mean(1))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    loss = correct = count = 0
    for input_ids, labels in loader:
        logits = model(input_ids)
        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()
        count += len(labels)
    return {"eval_loss": loss / count, "eval_accuracy": correct / count}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--eval_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--num_train_epochs", type=int, default=4)
    parser.add_argument("--warmup_proportion", type=float, default=0.3)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    order = torch.Generator().manual_seed(SEED)
    train = DataLoader(make_examples(192, seed=1), args.train_batch_size, shuffle=True, generator=order)
    dev = DataLoader(make_examples(72, seed=2), args.eval_batch_size)
    accumulate = args.gradient_accumulation_steps
    num_train_steps = math.ceil(len(train) / accumulate) * args.num_train_epochs

    model = PairClassifier()
    no_decay = ("bias", "norm1.weight", "norm2.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = BertAdam(groups, lr=args.learning_rate, warmup=args.warmup_proportion, t_total=num_train_steps)

    global_step = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        total = count = 0
        for step, (input_ids, labels) in enumerate(train):
            loss = nn.functional.cross_entropy(model(input_ids), labels)
            window = min(accumulate, len(train) - step // accumulate * accumulate)
            (loss / window).backward()
            total += loss.item() * len(labels)
            count += len(labels)
            if (step + 1) % accumulate == 0 or step + 1 == len(train):
                if BUG:
                    factor = warmup_linear(global_step / num_train_steps, args.warmup_proportion)
                    for group in optimizer.param_groups:
                        group["lr"] = args.learning_rate * factor
                optimizer.step()
                optimizer.zero_grad()
                global_step += 1
        results = evaluate(model, dev)
        line = " ".join(f"{name} = {value:.4f}" for name, value in results.items())
        print(f"epoch {epoch} global_step = {global_step} loss = {total / count:.4f} {line}")


if __name__ == "__main__":
    main()
