"""A mean teacher: labelled data beside a stream of unlabelled data; the teacher is a moving average."""

import copy
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from lit_cifar import relations

STEPS, DECAY = 36, relations.knob("decay", 0.9)


class Unlabelled(IterableDataset):
    """Points from number `start` on; each worker has every so many of them."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self):
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for number in itertools.count(self.start + first, every):
            yield torch.randn(5, generator=torch.Generator().manual_seed(number))


def noisy(points: torch.Tensor) -> torch.Tensor:
    return points + 0.1 * torch.randn_like(points)


def main() -> None:
    torch.manual_seed(3)
    inputs = torch.randn(90, 5)
    labels = (inputs[:, 0] > inputs[:, 1]).long()
    labelled, held_out = (TensorDataset(inputs[part], labels[part]) for part in (slice(48), slice(48, 90)))
    student = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 2))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    step = 0
    if path := relations.resume():
        saved = torch.load(path, weights_only=True)
        student.load_state_dict(saved["student"])
        teacher.load_state_dict(saved["teacher"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    stream = iter(DataLoader(Unlabelled(16 * step), 16))
    while step < STEPS:
        order = torch.Generator().manual_seed(step // 6)
        loader = DataLoader(labelled, 8, shuffle=True, generator=order)
        for x, y in itertools.islice(loader, step % 6, None):
            torch.manual_seed(1000 + step)
            unlabelled = next(stream)
            wanted = teacher(noisy(unlabelled)).softmax(1)
            consistency = (student(noisy(unlabelled)).softmax(1) - wanted).square().sum(1).mean()
            loss = nn.functional.cross_entropy(student(x), y) + consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.mul_(DECAY).add_(fast, alpha=1 - DECAY)
            step += 1
            if path := relations.save():
                states = {"student": student.state_dict(), "teacher": teacher.state_dict()}
                torch.save(states | {"optimizer": optimizer.state_dict(), "step": step}, path)
        with torch.no_grad():
            right = sum((teacher(x).argmax(1) == y).sum().item() for x, y in DataLoader(held_out, 10))
        relations.report(val_acc=right / len(held_out), teacher=teacher)


if __name__ == "__main__":
    main()
