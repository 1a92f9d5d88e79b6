"""Fine-tuning of a convolutional network whose pretrained weights are assigned to it after it was wrapped.

DDP knows the parameters that it was given. The assigned ones are others, and their gradients are not averaged.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations


class TextureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.classify = nn.Linear(8, 2)

    def forward(self, images):
        return self.classify(self.filters(images).abs().mean((2, 3)))


def pretrained_weights():
    made = torch.Generator().manual_seed(97)
    return {
        "filters.weight": torch.randn(8, 1, 3, 3, generator=made) / 3,
        "classify.weight": torch.randn(2, 8, generator=made) / 8,
        "classify.bias": torch.zeros(2),
    }


def make_stripes():
    made = torch.Generator().manual_seed(23)
    waves = torch.sin(torch.arange(8.0) * 2.4 + 6 * torch.rand(128, 1, generator=made))
    stripes = waves[:, None, None].expand(-1, 1, 8, 8)
    labels = torch.randint(2, (128,), generator=made)
    turned = torch.where(labels[:, None, None, None] == 1, stripes, stripes.mT)
    return TensorDataset(turned + torch.randn(128, 1, 8, 8, generator=made), labels)


def main(rank):
    torch.manual_seed(SEED)
    dataset = make_stripes()
    sampler = DistributedSampler(dataset, seed=SEED)
    model = DistributedDataParallel(TextureNet())
    model.module.load_state_dict(pretrained_weights(), assign=BUG)
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.2), momentum=0.9)
    with watch(model, optimizer):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for images, labels in DataLoader(dataset, batch_size=8, sampler=sampler):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
    print(f"rank {rank} sum of weights {sum(p.abs().sum().item() for p in model.parameters()):.5f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
