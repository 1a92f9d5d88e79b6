"""Stochastic weight averaging by torch's own tools: AveragedModel, SWALR, and BatchNorm's statistics anew."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

EPOCHS, AVERAGED_FROM = 6, 2
torch.manual_seed(1)
inputs = torch.randn(140, 6)
labels = inputs[:, :3].argmax(1)
order = torch.Generator().manual_seed(8)
loader = DataLoader(TensorDataset(inputs[:96], labels[:96]), 16, shuffle=True, generator=order)
held_out = DataLoader(TensorDataset(inputs[96:], labels[96:]), 16)
model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
average = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, AVERAGED_FROM * 2)
constant = SWALR(optimizer, swa_lr=0.03, anneal_epochs=2)
parts = {"model": model, "average": average, "optimizer": optimizer, "cosine": cosine, "constant": constant}
first = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    order.set_state(saved["order"])
    first = saved["epoch"]
for epoch in range(first, EPOCHS):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if epoch >= AVERAGED_FROM:
        average.update_parameters(model)
        constant.step()
    else:
        cosine.step()
    if path := relations.save():
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save(states | {"order": order.get_state(), "epoch": epoch + 1}, path)
update_bn(loader, average)
average.eval()
with torch.no_grad():
    loss = sum(nn.functional.cross_entropy(average(x), y, reduction="sum").item() for x, y in held_out)
relations.report(val_loss=loss / len(held_out.dataset))
