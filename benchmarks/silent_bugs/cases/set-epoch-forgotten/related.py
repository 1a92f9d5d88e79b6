"""Digits that a small convolutional network learns on two processes."""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations

EPOCHS = 4


def make_digits():
    made = torch.Generator().manual_seed(5)
    prototypes = torch.rand(10, 1, 8, 8, generator=made)
    labels = torch.randint(10, (160,), generator=made)
    return TensorDataset(prototypes[labels] + 0.3 * torch.randn(160, 1, 8, 8, generator=made), labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 4, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc(x.flatten(1))


def main(rank):
    torch.manual_seed(SEED)
    dataset = make_digits()
    sampler = DistributedSampler(dataset, shuffle=True, seed=SEED)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            if not BUG:
                sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
