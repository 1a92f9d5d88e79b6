"""Trains a small U-shaped net for segmentation by iterations, validates every --eval-num of them, keeps the best.

python project.py --max-iterations 48 --eval-num 12
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 3


class DiceMetric:
    """Cumulative: one row of class scores per image; an absent class has none."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.buffer = []

    def __call__(self, y_pred, y):
        y_pred, y = (F.one_hot(t, CLASSES).movedim(-1, 1)[:, 1:].flatten(2) for t in (y_pred, y))
        overlap, size = (y_pred * y).sum(2), y_pred.sum(2) + y.sum(2)
        dice = 2 * overlap / size
        dice[y.sum(2) == 0] = torch.nan
        self.buffer.append(dice)

    def aggregate(self):
        return torch.cat(self.buffer).nanmean(1).nanmean(0)


class DiceCELoss(nn.Module):
    def forward(self, logits, target):
        probabilities = logits.softmax(1)
        onehot = F.one_hot(target, CLASSES).movedim(-1, 1).to(logits)
        overlap = (probabilities * onehot).flatten(2).sum(2)
        size = (probabilities + onehot).flatten(2).sum(2)
        dice = 1 - (2 * overlap + 1e-5) / (size + 1e-5)
        return dice.mean() + F.cross_entropy(logits, target)


class Block(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.InstanceNorm2d(outputs, affine=True), nn.GELU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.down, self.up = Block(1, 8), Block(8, 16), Block(24, 8)
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        skip = self.enter(x)
        deep = F.interpolate(self.down(F.max_pool2d(skip, 2)), scale_factor=2.0)
        return self.out(self.up(torch.cat([skip, deep], 1)))


def scans(count, seed):
    """Two organs, a bright disc and a smaller dark one, on a noisy ground."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.arange(24.0)
    images, labels = torch.zeros(count, 1, 24, 24), torch.zeros(count, 24, 24, dtype=torch.long)
    for image, label in zip(images, labels, strict=True):
        for organ, (radius, value) in enumerate([(6, 1.0), (3.5, -1.0)], 1):
            y, x, stretch = torch.rand(3, generator=generator).tolist()
            y, x, radius = 4 + 15 * y, 4 + 15 * x, radius * (0.4 + 0.8 * stretch)
            inside = (grid[:, None] - y) ** 2 + (grid - x) ** 2 < radius**2
            label[inside] = organ
            image[0, inside] = value
    return TensorDataset(images + 0.7 * torch.randn(images.shape, generator=generator), labels)


@torch.no_grad()
def validation(model, val_loader, dice_metric):
    model.eval()
    dice_vals = []
    for val_inputs, val_labels in val_loader:
        dice_metric(y_pred=model(val_inputs).argmax(1), y=val_labels)
        if BUG:
            dice_vals.append(dice_metric.aggregate().item())
    mean_dice_val = sum(dice_vals) / len(dice_vals) if BUG else dice_metric.aggregate().item()
    dice_metric.reset()
    return mean_dice_val


def train(args, model, optimizer, train_loader, val_loader, path):
    loss_function, dice_metric = DiceCELoss(), DiceMetric()
    global_step, dice_val_best, global_step_best = 0, 0.0, 0
    epoch_loss, steps = 0.0, 0
    while global_step < args.max_iterations:
        for x, y in train_loader:
            model.train()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            epoch_loss, steps = epoch_loss + loss.item(), steps + 1
            global_step += 1
            if global_step % args.eval_num == 0 or global_step == args.max_iterations:
                dice_val = validation(model, val_loader, dice_metric)
                print(f"Training ({global_step} / {args.max_iterations} Steps) (loss={epoch_loss / steps:.5f})")
                epoch_loss, steps = 0.0, 0
                saved = dice_val > dice_val_best
                if saved:
                    dice_val_best, global_step_best = dice_val, global_step
                    torch.save(model.state_dict(), path)
                word = "Was Saved" if saved else "Was Not Saved"
                print(f"Model {word} ! Current Best Avg. Dice: {dice_val_best:.6f} Current Avg. Dice: {dice_val:.6f}")
            if global_step == args.max_iterations:
                break
    return dice_val_best, global_step_best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iterations", type=int, default=48)
    parser.add_argument("--eval-num", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--val-batch-size", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--output-dir", default="runs")
    args = parser.parse_args()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-5)
    train_loader = DataLoader(scans(96, seed=1), args.batch_size, shuffle=True)
    val_loader = DataLoader(scans(24, seed=2), args.val_batch_size)
    path = Path(args.output_dir) / "best_metric_model.pth"
    best, step = train(args, model, optimizer, train_loader, val_loader, path)
    print(f"train completed, best_metric: {best:.6f} at iteration: {step}")


if __name__ == "__main__":
    main()
