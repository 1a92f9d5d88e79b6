"""Automatic mixed precision with a GradScaler, accumulation with a ragged last window, clipping by norm, dropout."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

EPOCHS = 3
MICROBATCHES = relations.knob("accumulate", 4)
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(5)
inputs = torch.randn(150, 12)
labels = inputs[:, :5].argmax(1)
train = DataLoader(TensorDataset(inputs[:112], labels[:112]), batch_size=8, shuffle=True)
held_out = DataLoader(TensorDataset(inputs[112:], labels[112:]), batch_size=16)
model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 5)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 5e-3))
scaler = torch.amp.GradScaler(device, init_scale=relations.knob("loss_scale", 2.0**10))
loss_of = nn.CrossEntropyLoss()


def train_epoch() -> None:
    model.train()
    batches = [*train]
    for start in range(0, len(batches), MICROBATCHES):
        window = batches[start : start + MICROBATCHES]
        total = sum(len(labels) for _, labels in window)
        for x, y in window:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = loss_of(model(x.to(device)), y.to(device)) * len(y) / total
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate() -> float:
    model.eval()
    return sum(loss_of(model(x.to(device)), y.to(device)).item() * len(y) for x, y in held_out) / len(held_out.dataset)


def main() -> None:
    first = 0
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
        first = saved["epoch"]
    for epoch in range(first, EPOCHS):
        train_epoch()
        relations.report(val_loss=evaluate())
        if path := relations.save():
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(states | {"random": torch.get_rng_state(), "epoch": epoch + 1}, path)


main()
