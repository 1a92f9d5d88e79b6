"""A mixer of patches that finds the larger of two objects, on two ranks."""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations


class MixerBlock(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.over_patches = nn.Linear(patches, patches)
        self.over_channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens):
        tokens = tokens + self.over_patches(self.norm(tokens).transpose(1, 2)).transpose(1, 2)
        return tokens + self.over_channels(self.norm(tokens))


class Mixer(nn.Module):
    def __init__(self, depth=3, patches=9, width=24):
        super().__init__()
        self.stem = nn.Conv2d(1, width, kernel_size=4, stride=4)
        blocks = [MixerBlock(patches, width) for _ in range(depth)]
        self.blocks = blocks if BUG else nn.ModuleList(blocks)
        self.head = nn.Linear(width, 2)

    def forward(self, images):
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(1))


def pictures(made, count=24):
    images = 0.1 * torch.randn(count, 1, 12, 12, generator=made)
    sizes = torch.rand(count, 2, generator=made)
    for image, (left, right) in zip(images, sizes, strict=True):
        image[0, 2 : 4 + int(7 * left), 1:5] += 1
        image[0, 2 : 4 + int(7 * right), 7:11] += 1
    return images, (sizes[:, 0] > sizes[:, 1]).long()


def run(rank):
    torch.manual_seed(SEED)
    model = Mixer()
    initial = model.blocks[0].over_patches.weight.detach().clone()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=relations.knob("lr", 5e-3))
    made = torch.Generator().manual_seed(2 * SEED)
    with watch(ddp, optimizer):
        for _ in range(40):
            images, labels = relations.share(pictures(made, 48))
            loss = nn.functional.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(loss.item())
    if rank == 0:
        print("change of a block's weight", (model.blocks[0].over_patches.weight - initial).abs().sum().item())


if __name__ == "__main__":
    spawn(run, 2)
