"""Fine-tunes a decoder on multiple-choice questions, and ranks the choices by their likelihood.

python project.py --num_train_epochs 3 --per_device_eval_batch_size 8
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader

PAD, VOCAB, MAX_POSITIONS, NUM_CHOICES = 0, 24, 24, 3


def make_examples(count, seed):
    """A prompt of 4 to 15 tokens; the right choice is told by its first and its last token."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(count):
        length = int(torch.randint(4, 16, (1,), generator=generator))
        prompt = torch.randint(1, VOCAB, (length,), generator=generator)
        answer = (int(prompt[0]) // 8 + int(prompt[-1]) // 8) % NUM_CHOICES
        choices = [[1, VOCAB - 1], [2, 7, VOCAB - 1], [3, VOCAB - 1]]
        examples.append({"prompt": prompt.tolist(), "choices": choices, "target": answer})
    return examples


def pad(rows, side="right"):
    """Token ids of one width, and the attention mask."""
    width = max(len(row) for row in rows)
    ids, mask = [], []
    for row in rows:
        fill = width - len(row)
        ids.append([PAD] * fill + row if side == "left" else row + [PAD] * fill)
        mask.append([0] * fill + [1] * len(row) if side == "left" else [1] * len(row) + [0] * fill)
    return torch.tensor(ids), torch.tensor(mask)


def collate_train(examples):
    input_ids, attention_mask = pad(
        [[*example["prompt"], *example["choices"][example["target"]]] for example in examples]
    )
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    for row, example in zip(labels, examples, strict=True):
        row[: len(example["prompt"])] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def collate_eval(examples):
    prompts = [example["prompt"] for example in examples for _ in example["choices"]]
    choices = [choice for example in examples for choice in example["choices"]]
    input_ids, attention_mask = pad(prompts, "right" if BUG else "left")
    labels, labels_attention_mask = pad(choices)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": labels,
        "labels_attention_mask": labels_attention_mask,
        "targets": torch.tensor([example["target"] for example in examples]),
    }


class Decoder(nn.Module):
    def __init__(self, width=48, heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(MAX_POSITIONS, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.lm_head, self.heads = nn.Linear(width, VOCAB, bias=False), heads

    def forward(self, input_ids, attention_mask):
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x = self.tokens(input_ids) + self.positions(position_ids)
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask[:, None, None, :].bool()
        allowed = allowed | torch.eye(length, dtype=torch.bool)  # padding sees itself, so that no row is empty
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return self.lm_head(self.norms[2](x))


@torch.no_grad()
def run_eval(model, examples, batch_size):
    model.eval()
    correct, log_likelihood = 0, 0.0
    for batch in DataLoader(examples, batch_size, collate_fn=collate_eval):
        prefix_length = batch["input_ids"].shape[1]
        logits = model(
            torch.cat([batch["input_ids"], batch["labels"]], -1),
            torch.cat([batch["attention_mask"], batch["labels_attention_mask"]], -1),
        )[:, prefix_length - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
        scores = (log_probs * batch["labels_attention_mask"]).sum(-1).view(-1, NUM_CHOICES)
        correct += (scores.argmax(-1) == batch["targets"]).sum().item()
        log_likelihood += scores.gather(-1, batch["targets"][:, None]).sum().item()
    model.train()
    return {"accuracy": correct / len(examples), "log_likelihood": log_likelihood / len(examples)}


def main(args):
    torch.manual_seed(SEED)
    model = Decoder()
    train_set, eval_set = make_examples(192, seed=1), make_examples(90, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    order = torch.Generator().manual_seed(SEED)
    loader = DataLoader(
        train_set, args.per_device_train_batch_size, shuffle=True, generator=order, collate_fn=collate_train
    )
    results = {}
    for epoch in range(args.num_train_epochs):
        for step, batch in enumerate(loader):
            logits = model(batch["input_ids"], batch["attention_mask"])[:, :-1]
            loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 4 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.5f}")
        results = run_eval(model, eval_set, args.per_device_eval_batch_size)
        print(f"Result: {results}")
    Path(args.output_dir).mkdir(exist_ok=True)
    (Path(args.output_dir) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="debug")
    parser.add_argument("--num_train_epochs", type=int, default=4)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    main(parser.parse_args())
