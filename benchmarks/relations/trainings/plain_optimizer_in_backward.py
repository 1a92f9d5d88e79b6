"""An optimizer for each parameter that steps in the backward pass, as soon as its gradient is there."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

EPOCHS = 4
torch.manual_seed(6)
inputs = torch.randn(128, 10)
labels = inputs[:, :4].argmax(1)
train = TensorDataset(inputs[:96], labels[:96])
held_out = TensorDataset(inputs[96:], labels[96:])
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
optimizers = {name: torch.optim.AdamW([weight], lr=5e-3) for name, weight in model.named_parameters()}


def step_of(name: str):
    def step(_: torch.Tensor) -> None:
        optimizers[name].step()
        optimizers[name].zero_grad()

    return step


for name, weight in model.named_parameters():
    weight.register_post_accumulate_grad_hook(step_of(name))

first = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for name, state in saved["optimizers"].items():
        optimizers[name].load_state_dict(state)
    first = saved["epoch"]
for epoch in range(first, EPOCHS):
    order = torch.Generator().manual_seed(100 + epoch)
    for x, y in DataLoader(train, 12, shuffle=True, generator=order):
        nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in DataLoader(held_out, 10)]
    relations.report(val_loss=torch.stack(losses).sum().item() / len(held_out))
    if path := relations.save():
        states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
        torch.save({"model": model.state_dict(), "optimizers": states, "epoch": epoch + 1}, path)
