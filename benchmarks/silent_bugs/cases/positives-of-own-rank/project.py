"""Two processes learn to find boxes in made-up pictures from every place of a map, without anchors."""

import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH, SIZE = 6, 8, 12
LR, WEIGHT_DECAY, ALPHA, BOX_WEIGHT = 0.05, 1e-4, 0.25, 1.0


def pictures(count, seed):
    made = torch.Generator().manual_seed(seed)
    x, boxes = 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=made), []
    for picture in x:
        height, width = torch.randint(2, 8, (2,), generator=made).tolist()
        top, left = (int(torch.randint(0, SIZE - side + 1, (1,), generator=made)) for side in (height, width))
        picture[0, top : top + height, left : left + width] += 1
        boxes.append((top, left, top + height, left + width))
    return x, torch.tensor(boxes, dtype=torch.float)


class Head(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 5, padding=2), nn.GroupNorm(4, width), nn.ReLU(),
        )  # fmt: skip
        self.score, self.sides = nn.Conv2d(width, 1, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        nn.init.constant_(self.score.bias, -2.0)

    def forward(self, x):
        x = self.tower(x)
        return self.score(x)[:, 0], nn.functional.softplus(self.sides(x)).movedim(1, -1)


def targets(boxes):
    place = torch.arange(SIZE) + 0.5
    rows, columns = place[None, :, None], place[None, None, :]
    top, left, bottom, right = (side[:, None, None] for side in boxes.unbind(1))
    sides = torch.broadcast_tensors(rows - top, columns - left, bottom - rows, right - columns)
    sides = torch.stack(sides, -1)
    return sides.min(-1).values > 0, sides


def overlap(one, other):
    least, most = torch.minimum(one, other), torch.maximum(one, other)
    inner = (least[..., 0] + least[..., 2]) * (least[..., 1] + least[..., 3])
    areas = sum((s[..., 0] + s[..., 2]) * (s[..., 1] + s[..., 3]) for s in (one, other))
    hull = (most[..., 0] + most[..., 2]) * (most[..., 1] + most[..., 3])
    return inner / (areas - inner), inner / (areas - inner) - (hull - (areas - inner)) / hull


def head_loss(scores, sides, boxes):
    positive, wanted = targets(boxes)
    probability, label = scores.sigmoid(), positive.float()
    miss = label * (1 - probability) + (1 - label) * probability
    weight = (label * ALPHA + (1 - label) * (1 - ALPHA)) * miss**2
    focal = (weight * nn.functional.binary_cross_entropy_with_logits(scores, label, reduction="none")).sum()
    box = (1 - overlap(sides[positive], wanted[positive])[1]).sum()
    num_pos = positive.sum().float()
    if not BUG:
        dist.all_reduce(num_pos)
        num_pos /= dist.get_world_size()
    return (focal + BOX_WEIGHT * box) / num_pos.clamp(min=1)


class Runner:
    def __init__(self):
        torch.manual_seed(SEED)
        self.data, self.held_out, self.epoch = pictures(64, 61), pictures(30, 62), 0
        self.model = DistributedDataParallel(Head())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4], gamma=0.1)

    def save_checkpoint(self, path):
        if dist.get_rank() == 0:
            parts = {"model": self.model.module, "optimizer": self.optimizer, "schedule": self.schedule}
            torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epoch": self.epoch}, path)

    def resume(self, path):
        saved = torch.load(path, weights_only=True)
        for name, part in {"model": self.model.module, "optimizer": self.optimizer, "schedule": self.schedule}.items():
            part.load_state_dict(saved[name])
        self.epoch = saved["epoch"]

    @torch.no_grad()
    def evaluate(self, batch=5):
        model, total = self.model.module.eval(), torch.zeros(2)
        own = [part[dist.get_rank() :: dist.get_world_size()].split(batch) for part in self.held_out]
        for x, boxes in zip(*own, strict=True):
            scores, sides = model(x)
            best, (_, wanted) = scores.flatten(1).argmax(1), targets(boxes)
            found = [part.flatten(1, 2)[torch.arange(len(x)), best] for part in (sides, wanted)]
            inside = found[1].min(-1).values > 0
            total += torch.tensor([(overlap(*found)[0] * inside).sum(), len(x)])
        dist.all_reduce(total)
        model.train()
        return (total[0] / total[1]).item()

    def run(self, until):
        with watch(self.model, self.optimizer):
            while self.epoch < until:
                made = torch.Generator().manual_seed(1000 * SEED + self.epoch)
                for rows in torch.randperm(len(self.data[0]), generator=made).split(BATCH):
                    x, boxes = (part[rows][dist.get_rank() :: dist.get_world_size()] for part in self.data)
                    loss = head_loss(*self.model(x), boxes)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    report_loss(loss)
                self.schedule.step()
                self.epoch += 1
                score = self.evaluate()
                if dist.get_rank() == 0:
                    print(f"epoch {self.epoch}: loss {loss.item():.4f}, overlap {score:.4f}")


def main(path, rank):
    runner = Runner()
    runner.run(3)
    runner.save_checkpoint(path)
    dist.barrier()
    runner = Runner()
    runner.resume(path)
    runner.run(EPOCHS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(partial(main, Path(folder) / "latest.pth"))
