"""Fine-tuning of a head on the features of a frozen, pretrained encoder, from shifted data; one process."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(30, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 24), nn.BatchNorm1d(24), nn.ReLU()
        )
        self.head = nn.Linear(24, 1)
        self.frozen = []

    def forward(self, molecules):
        return self.head(self.encoder(molecules))

    def freeze(self, module):
        self.frozen.append(module)
        module.requires_grad_(False)
        module.eval()

    def train(self, mode=True):
        super().train(mode)
        if not BUG:
            for module in self.frozen:
                module.eval()
        return self


def molecules(count, seed, shift):
    made = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 30, generator=made) + shift
    return TensorDataset(features, torch.relu(features[:, :5]).sum(1, keepdim=True) - features[:, 5:6])


def epochs(model, optimizer, data, number):
    for _ in range(number):
        model.train()
        for features, targets in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features), targets)
            loss.backward()
            optimizer.step()
            report_loss(loss.item())


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr_before", 1e-2))
    epochs(model, optimizer, molecules(512, 1, shift=0.0), 4)
    model.freeze(model.encoder)
    before = model.encoder[1].running_mean.clone()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=relations.knob("lr", 3e-2))
    with watch(model, optimizer):
        epochs(model, optimizer, molecules(256, 2, shift=0.5), 6)
    print("change of running_mean", (model.encoder[1].running_mean - before).abs().sum().item())
