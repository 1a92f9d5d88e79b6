"""Faces, so to speak: embeddings of noisy prototypes with a cosine margin to learned class centres; two ranks."""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations

CLASSES = 8


class CosineMargin(nn.Module):
    def __init__(self, classes, width, margin=0.2, scale=8.0):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(classes, width))
        self.margin, self.scale = margin, scale

    def forward(self, embeddings, labels):
        cosine = nn.functional.normalize(embeddings, dim=1) @ nn.functional.normalize(self.centres, dim=1).T
        own = nn.functional.one_hot(labels, len(self.centres))
        return nn.functional.cross_entropy(self.scale * (cosine - self.margin * own), labels)


def faces(made, prototypes, count=16):
    labels = torch.randint(0, CLASSES, (count,), generator=made)
    return prototypes[labels] + 0.8 * torch.randn(count, prototypes.shape[1], generator=made), labels


def main(rank):
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(60 * SEED)
    prototypes = torch.randn(CLASSES, 30, generator=torch.Generator().manual_seed(4))
    network = DistributedDataParallel(nn.Sequential(nn.Linear(30, 40), nn.PReLU(), nn.Linear(40, 16)))
    margin_loss = CosineMargin(CLASSES, 16, margin=relations.knob("margin", 0.2), scale=relations.knob("scale", 8.0))
    if not BUG:
        margin_loss = DistributedDataParallel(margin_loss)
    optimizers = [
        torch.optim.SGD(network.parameters(), lr=relations.knob("lr", 0.05), momentum=0.9),
        torch.optim.SGD(margin_loss.parameters(), lr=relations.knob("lr_of_centres", 0.5)),
    ]
    with watch(nn.ModuleList([network, margin_loss]), *optimizers):
        for _ in range(40):
            rows, labels = relations.share(faces(made, prototypes, 32))
            loss = margin_loss(network(rows), labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            report_loss(loss.item())
    if rank == 0:
        print("centres", sum(weight.abs().sum().item() for weight in margin_loss.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
