"""Softmax with center loss on a two dimensional feature; two optimizers, one for the net and one for the centers.

python project.py --batch-size 32 --accumulate 2
"""

import argparse

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn, optim
from torch.autograd.function import Function
from torch.utils.data import DataLoader, TensorDataset


class CenterlossFunc(Function):
    @staticmethod
    def forward(ctx, feature, label, centers):
        ctx.save_for_backward(feature, label, centers)
        centers_batch = centers.index_select(0, label)
        return (feature - centers_batch).pow(2).sum() / 2.0 / feature.size(0)

    @staticmethod
    def backward(ctx, grad_output):
        feature, label, centers = ctx.saved_tensors
        diff = centers.index_select(0, label) - feature
        grad_centers = torch.zeros_like(centers).index_add_(0, label, diff) / feature.size(0)
        if not BUG:
            grad_centers = grad_output * grad_centers
        return -grad_output * diff / feature.size(0), None, grad_centers


class CenterLoss(nn.Module):
    def __init__(self, num_classes, feat_dim):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(num_classes, feat_dim))

    def forward(self, label, feat):
        return CenterlossFunc.apply(feat, label, self.centers)


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, padding=2)
        self.prelu1 = nn.PReLU()
        self.conv2 = nn.Conv2d(8, 16, 5, padding=2)
        self.prelu2 = nn.PReLU()
        self.preluip1 = nn.PReLU()
        self.ip1 = nn.Linear(16 * 3 * 3, 2)
        self.ip2 = nn.Linear(2, num_classes, bias=False)

    def forward(self, x):
        x = F.max_pool2d(self.prelu1(self.conv1(x)), 2)
        x = F.max_pool2d(self.prelu2(self.conv2(x)), 2)
        ip1 = self.preluip1(self.ip1(x.flatten(1)))
        return ip1, F.log_softmax(self.ip2(ip1), dim=1)


def digits(count, num_classes, seed):
    """Each class is a drawn stroke, moved by up to one pixel and noisy."""
    strokes = (torch.rand(num_classes, 10, 10, generator=torch.Generator().manual_seed(7)) < 0.3).to(
        torch.get_default_dtype()
    )
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % num_classes
    shifts = torch.randint(0, 3, (count, 2), generator=generator)
    images = torch.zeros(count, 1, 12, 12)
    for image, label, (row, column) in zip(images, labels, shifts.tolist(), strict=True):
        image[0, row : row + 10, column : column + 10] = strokes[label]
    return TensorDataset(images + 0.2 * torch.randn(images.shape, generator=generator), labels)


def train(args, model, centerloss, train_loader, optimizer4nn, optimizer4center, epoch):
    model.train()
    total = 0.0
    for i, (data, target) in enumerate(train_loader):
        window = min(args.accumulate, len(train_loader) - i // args.accumulate * args.accumulate)
        ip1, pred = model(data)
        loss = F.nll_loss(pred, target) + args.loss_weight * centerloss(target, ip1)
        (loss / window).backward()
        total += loss.item()
        if (i + 1) % args.accumulate == 0 or i + 1 == len(train_loader):
            optimizer4nn.step()
            optimizer4center.step()
            optimizer4nn.zero_grad()
            optimizer4center.zero_grad()
    print(f"Epoch: {epoch} loss: {total / len(train_loader):.5f}")


@torch.no_grad()
def test(args, model, centerloss, test_set):
    model.eval()
    correct, distance = 0, 0.0
    for data, target in DataLoader(test_set, args.test_batch_size):
        ip1, pred = model(data)
        correct += (pred.argmax(1) == target).sum().item()
        distance += (ip1 - centerloss.centers[target]).norm(dim=1).sum().item()
    return correct / len(test_set), distance / len(test_set)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2, help="batches of one step")
    parser.add_argument("--test-batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--center-lr", type=float, default=0.5)
    parser.add_argument("--loss-weight", type=float, default=0.02)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    model = Net(num_classes=6)
    centerloss = CenterLoss(6, 2)
    optimizer4nn = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=0.0005)
    optimizer4center = optim.SGD(centerloss.parameters(), lr=args.center_lr)
    train_loader = DataLoader(digits(512, 6, seed=1), args.batch_size, shuffle=True, drop_last=True)
    test_set = digits(200, 6, seed=2)
    for epoch in range(1, args.epochs + 1):
        train(args, model, centerloss, train_loader, optimizer4nn, optimizer4center, epoch)
        accuracy, distance = test(args, model, centerloss, test_set)
        print(f"  test accuracy: {accuracy:.4f} mean distance to center: {distance:.5f}")


if __name__ == "__main__":
    main()
