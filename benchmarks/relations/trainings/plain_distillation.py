"""A student learns from a frozen teacher that was trained before it, with label smoothing and a clipped norm."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations

ALPHA, WARMTH = relations.knob("alpha", 0.5), relations.knob("warmth", 2.0)
EVALUATED = relations.knob("evaluation_batch", 9)


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(10, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 4))


def fit(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(5)
    inputs = torch.randn(120, 10)
    labels = inputs[:, :4].argmax(1)
    teacher, student = network(32), network(8)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30),
        ],
        milestones=[6],
    )
    parts = {"teacher": teacher, "student": student, "optimizer": optimizer, "schedule": schedule}
    done = 0
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        done = saved.pop("done")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    else:
        fit(teacher, inputs[:100], labels[:100])
    teacher.requires_grad_(False).eval()
    for epoch in range(done, 4):
        order = torch.Generator().manual_seed(100 + epoch)
        for x, y in DataLoader(TensorDataset(inputs[:100], labels[:100]), 10, shuffle=True, generator=order):
            with torch.no_grad():
                wanted = (teacher(x) / WARMTH).softmax(1)
            logits = student(x)
            soft = nn.functional.cross_entropy(logits / WARMTH, wanted) * WARMTH**2
            hard = nn.functional.cross_entropy(logits, y, label_smoothing=0.1)
            optimizer.zero_grad()
            (ALPHA * soft + (1 - ALPHA) * hard).backward()
            nn.utils.clip_grad_norm_(student.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        student.eval()
        with torch.no_grad():
            right = sum(
                int((student(x).argmax(1) == y).sum())
                for x, y in zip(inputs[100:].split(EVALUATED), labels[100:].split(EVALUATED), strict=True)
            )
        student.train()
        relations.report(val_accuracy=right / 20)
        if path := relations.save():
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"done": epoch + 1}, path)


main()
