"""Points of made-up street scenes are labelled; a mean teacher carries a network from one sensor over to another.

The teacher labels the points of the other sensor, the student learns from both, and the teacher is validated.
"""

import copy
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

CLASSES, POINTS, BATCH, WARM_UP, EPOCHS, TAU = 3, 32, 8, 2, 6, 0.9


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(4, 24, 1), nn.BatchNorm1d(24), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv1d(48, 24, 1), nn.BatchNorm1d(24), nn.ReLU())
        self.head = nn.Conv1d(24, CLASSES, 1)

    def forward(self, points):
        local = self.local(points)
        scene = local.amax(2, keepdim=True).expand_as(local)
        return self.head(self.deep(torch.cat([local, scene], 1)))


def scenes(count, seed, height, strength):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count, POINTS), generator=made)
    points = torch.randn(count, 4, POINTS, generator=made)
    points[:, 2] += 1.5 * labels + height
    points[:, 3] = strength * (points[:, 3] + (labels == 1) * 2.0)
    return points, labels


class MomentumUpdater:
    def __init__(self, tau):
        self.tau = tau

    @torch.no_grad()
    def update(self, online_net, momentum_net):
        for online, momentum in zip(online_net.parameters(), momentum_net.parameters(), strict=True):
            momentum.mul_(self.tau).add_(online, alpha=1 - self.tau)
        if BUG:
            return
        for online, momentum in zip(online_net.buffers(), momentum_net.buffers(), strict=True):
            if momentum.is_floating_point():
                momentum.mul_(self.tau).add_(online, alpha=1 - self.tau)
            else:
                momentum.copy_(online)


@torch.no_grad()
def validate(model, points, labels, batch_size=16):
    model.eval()
    pairs = zip(points.split(batch_size), labels.split(batch_size), strict=True)
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in pairs)
    return right / labels.numel()


def adapt(path, epochs):
    torch.manual_seed(SEED)
    source, target = scenes(64, 21, 0.0, 1.0), scenes(64, 22, 0.8, 1.6)
    held_out = scenes(40, 23, 0.8, 1.6)
    student = PointNet()
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01, weight_decay=0.01)
    updater, first = MomentumUpdater(TAU), 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        first = saved["epoch"]
        student.load_state_dict(saved["student"])
        teacher.load_state_dict(saved["teacher"])
        optimizer.load_state_dict(saved["optimizer"])
    with watch(student, optimizer):
        for epoch in range(first, epochs):
            student.train()
            made = torch.Generator().manual_seed(100 * SEED + epoch)
            orders = [torch.randperm(64, generator=made).split(BATCH) for _ in range(2)]
            for here, there in zip(*orders, strict=True):
                loss = nn.functional.cross_entropy(student(source[0][here]), source[1][here])
                if epoch >= WARM_UP:
                    with torch.no_grad():
                        sure, guess = teacher(target[0][there]).softmax(1).max(1)
                    each = nn.functional.cross_entropy(student(target[0][there]), guess, reduction="none")
                    loss = loss + (each * (sure > 0.6)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updater.update(student, teacher)
                report_loss(loss.item())
            print(f"epoch {epoch}: teacher {validate(teacher, *held_out):.4f}")
            parts = {"student": student, "teacher": teacher, "optimizer": optimizer}
            torch.save({"epoch": epoch + 1, **{name: part.state_dict() for name, part in parts.items()}}, path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        adapt(Path(folder) / "last.ckpt", EPOCHS)
