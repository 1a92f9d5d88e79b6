"""A moving average of the weights by torch's AveragedModel, evaluated beside the model; the best is kept in a file."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

torch.manual_seed(2)
DECAY, EVERY, STEPS = relations.knob("decay", 0.9), relations.knob("validate_every", 6), 48
inputs = torch.randn(128, 4)
targets = (inputs**2).sum(1, keepdim=True)
train = TensorDataset(inputs[:96], targets[:96])
held_out = TensorDataset(inputs[96:], targets[96:])
model = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Linear(32, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
kept = Path(tempfile.mkdtemp(), "best.pt")
best = float("inf")


def batches(begin: int):
    """Batches without end, from step `begin` on; the order is a function of the epoch."""
    step = begin
    while True:
        order = torch.Generator().manual_seed(step // 12)
        loader = DataLoader(train, 8, shuffle=True, generator=order)
        for number, batch in enumerate(loader):
            if number >= step % 12:
                yield batch
        step = (step // 12 + 1) * 12


def evaluate(module: nn.Module) -> float:
    was_training = module.training
    module.eval()
    with torch.no_grad():
        total = sum(float((module(x) - y).square().sum()) for x, y in DataLoader(held_out, 10))
    module.train(was_training)
    return total / len(held_out)


step = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    average.load_state_dict(saved["average"])
    optimizer.load_state_dict(saved["optimizer"])
    step, best = saved["step"], saved["best"]
for x, y in batches(step):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    average.update_parameters(model)
    step += 1
    if step % EVERY == 0:
        loss = evaluate(average)
        relations.report(val_loss=evaluate(model), val_average=loss)
        if loss < best:
            best = loss
            torch.save(average.state_dict(), kept)
            relations.report(score=best)
            again = AveragedModel(nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Linear(32, 1)))
            again.load_state_dict(torch.load(kept, weights_only=True))
            relations.report(rescored=evaluate(again))
    if path := relations.save():
        states = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states | {"step": step, "best": best}, path)
    if step == STEPS:
        break
