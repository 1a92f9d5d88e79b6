"""A small encoder and decoder find blobs in made-up pictures; the epoch with the best overlap is kept."""

import copy

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, SIZE = 6, 8, 16
LR, WEIGHT_DECAY, DICE_WEIGHT, THRESHOLD = 0.01, 1e-4, 0.5, 0.5


def pictures(count, seed):
    made = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    center = torch.rand(count, 2, 1, 1, generator=made) * SIZE
    radius = 1.5 + 6 * torch.rand(count, 1, 1, generator=made) ** 2
    masks = ((rows - center[:, 0]) ** 2 + (columns - center[:, 1]) ** 2 < radius**2).float()[:, None]
    return TensorDataset(masks + 0.6 * torch.randn(count, 1, SIZE, SIZE, generator=made), masks)


class Net(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.middle = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Upsample(scale_factor=2),
        )  # fmt: skip
        self.head = nn.Conv2d(3 * width, 1, 3, padding=1)

    def forward(self, x):
        x = self.encoder(x)
        return self.head(torch.cat([x, self.middle(x)], 1)).sigmoid()


def iou(predicted, truth, threshold=THRESHOLD, eps=1e-7):
    predicted = (predicted > threshold).float()
    over = (0, 1, 2, 3) if BUG else (1, 2, 3)
    intersection = (truth * predicted).sum(over)
    union = truth.sum(over) + predicted.sum(over) - intersection
    return ((intersection + eps) / (union + eps)).mean()


def dice_loss(predicted, truth):
    overlap = (predicted * truth).sum((1, 2, 3))
    return (1 - (2 * overlap + 1) / (predicted.sum((1, 2, 3)) + truth.sum((1, 2, 3)) + 1)).mean()


class Epoch:
    def __init__(self, model, optimizer=None):
        self.model, self.optimizer = model, optimizer

    def run(self, loader):
        self.model.train(self.optimizer is not None)
        total, seen = torch.zeros(2), 0
        with torch.set_grad_enabled(self.optimizer is not None):
            for x, truth in loader:
                predicted = self.model(x)
                loss = nn.functional.binary_cross_entropy(predicted, truth) + DICE_WEIGHT * dice_loss(predicted, truth)
                if self.optimizer is not None:
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    report_loss(loss)
                total += len(x) * torch.stack([loss.detach(), iou(predicted.detach(), truth)])
                seen += len(x)
        self.model.train()
        return [value.item() for value in total / seen]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    train, valid_loader = pictures(64, 51), DataLoader(pictures(28, 52), 8)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.3)
    train_epoch, valid_epoch, best, best_weights = Epoch(model, optimizer), Epoch(model), 0.0, None
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            order = torch.Generator().manual_seed(1000 * SEED + epoch)
            loss, score = train_epoch.run(DataLoader(train, BATCH, shuffle=True, generator=order))
            valid_loss, valid_score = valid_epoch.run(valid_loader)
            schedule.step()
            if valid_score > best:
                best, best_weights = valid_score, copy.deepcopy(model.state_dict())
            print(f"epoch {epoch}: {loss:.4f}, {score:.4f}; valid {valid_loss:.4f}, {valid_score:.4f}, best {best:.4f}")
    model.load_state_dict(best_weights)
