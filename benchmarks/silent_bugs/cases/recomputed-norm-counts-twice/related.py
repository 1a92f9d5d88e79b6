"""Is a patch rough or smooth? A small residual net whose blocks are recomputed in the backward pass."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

MOMENTUM = relations.knob("momentum", 0.3)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        momentum = MOMENTUM if BUG else 1 - (1 - MOMENTUM) ** 0.5  # two updates by it are one by MOMENTUM
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels, momentum=momentum),
            nn.ReLU(),
        )

    def forward(self, hidden):
        return hidden + self.body(hidden)


class Roughness(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.out = nn.Linear(8, 2)

    def forward(self, patches):
        hidden = self.first(patches)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.training else block(hidden)
        return self.out(hidden.mean((2, 3)))


def patches(count, seed):
    made = torch.Generator().manual_seed(seed)
    rough = torch.randint(0, 2, (count,), generator=made)
    light = torch.randn(count, 1, 1, 1, generator=made)
    ground = torch.randn(count, 1, 8, 8, generator=made)
    smooth = nn.functional.avg_pool2d(ground, 3, stride=1, padding=1) * 2
    return TensorDataset(light + torch.where(rough.view(-1, 1, 1, 1) == 1, ground, smooth), rough)


@torch.no_grad()
def validate(model, data):
    model.eval()
    total = sum(nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in DataLoader(data, batch_size=32))
    model.train()
    return total.item() / len(data)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = Roughness()
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.02), momentum=0.9)
    train, held_out = patches(120, 1), patches(96, 2)
    with watch(model, optimizer):
        for epoch in range(3):
            for x, y in DataLoader(train, batch_size=6, shuffle=True):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            if epoch % relations.knob("validate_every", 1) == 0:
                val_loss = validate(model, held_out)
                relations.report(val_loss=val_loss)
                print(f"epoch {epoch}: validation loss {val_loss:.5f}")
