"""Rare classes: a weighted sampler, a frozen backbone in evaluation mode, rates and weight decay by group, mixup."""

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, WeightedRandomSampler

from lit_cifar import relations

EPOCHS = 4


def data(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 7, generator=draw)
    return TensorDataset(inputs, (inputs[:, 0] > 1.0).long())


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(7, 20), nn.BatchNorm1d(20), nn.ReLU()).requires_grad_(False)
        self.neck, self.head = nn.Linear(20, 20), nn.Linear(20, 2)

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.neck(self.backbone(inputs)).relu())


torch.manual_seed(0)
train, held_out = data(112, 0), data(41, 1)
counts = train.tensors[1].bincount()
draw = torch.Generator().manual_seed(2)
weights = 1 / counts[train.tensors[1]]
sampler = WeightedRandomSampler(weights, len(train), generator=draw)
loader = DataLoader(train, batch_sampler=BatchSampler(sampler, 14, drop_last=False))
model = Network()
alpha = relations.knob("alpha", 0.5)
groups = [
    {"params": model.neck.parameters(), "lr": 0.02, "weight_decay": 1e-2},
    {"params": model.head.parameters(), "weight_decay": 0.0},
]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
first = 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    draw.set_state(saved["draw"])
    first = saved["epoch"]
for epoch in range(first, EPOCHS):
    model.train()
    for x, y in loader:
        share = torch.distributions.Beta(alpha, alpha).sample()
        other = torch.randperm(len(x))
        logits = model(share * x + (1 - share) * x[other])
        cross_entropy = nn.functional.cross_entropy
        loss = share * cross_entropy(logits, y) + (1 - share) * cross_entropy(logits, y[other])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        found = torch.cat([model(x).argmax(1) for x, _ in DataLoader(held_out, 12)])
    labels = held_out.tensors[1]
    recalls = [(found[labels == label] == label).double().mean().item() for label in (0, 1)]
    relations.report(val_balanced_accuracy=sum(recalls) / 2)
    if path := relations.save():
        random = {"random": torch.get_rng_state(), "draw": draw.get_state()}
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states | random | {"epoch": epoch + 1}, path)
