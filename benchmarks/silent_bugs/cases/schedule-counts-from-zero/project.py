"""Points of made-up scenes are told apart by the part that they belong to; the training stops once and goes on."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, POINTS, PARTS = 6, 8, 64, 3
BASE_LR, LR_DECAY, BN_MOMENTUM, DECAY_BATCHES, WEIGHT_DECAY = 0.02, 0.5, 0.3, 12, 1e-4


class LRScheduler:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step_to(self, count):
        for group in self.optimizer.param_groups:
            group["lr"] = BASE_LR * max(LR_DECAY ** (count / DECAY_BATCHES), 0.01)


class BNMomentumScheduler:
    def __init__(self, network):
        self.norms = [part for part in network.modules() if isinstance(part, nn.BatchNorm1d)]

    def step_to(self, count):
        for norm in self.norms:
            norm.momentum = max(BN_MOMENTUM * LR_DECAY ** (count // DECAY_BATCHES), 0.01)


def dense(ins, outs):
    return nn.Sequential(nn.Linear(ins, outs), nn.BatchNorm1d(outs), nn.ReLU())


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(dense(3, 24), dense(24, 32))
        self.head = nn.Sequential(dense(64, 32), nn.Linear(32, PARTS))

    def forward(self, points):
        local = self.local(points.flatten(0, 1)).unflatten(0, points.shape[:2])
        scene = local.max(1, keepdim=True).values.expand_as(local)
        return self.head(torch.cat([local, scene], -1).flatten(0, 1)).unflatten(0, points.shape[:2])


class SegmentationModel:
    def __init__(self):
        self.network, self._num_epochs, self._num_batches = PointNet(), 0, 0
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=BASE_LR, weight_decay=WEIGHT_DECAY)
        self.schedulers = [LRScheduler(self.optimizer), BNMomentumScheduler(self.network)]
        self.update_schedulers()

    def update_schedulers(self):
        for scheduler in self.schedulers:
            scheduler.step_to(self._num_batches)

    def optimize_parameters(self, points, parts):
        loss = nn.functional.cross_entropy(self.network(points).flatten(0, 1), parts.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._num_batches += 1
        self.update_schedulers()
        return loss

    def save(self, path):
        saved = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        if not BUG:
            saved["num_batches"] = self._num_batches
        torch.save({**saved, "epoch": self._num_epochs}, path)

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self._num_epochs, self._num_batches = saved["epoch"], saved.get("num_batches", 0)
        self.update_schedulers()


def scenes(count, seed):
    made = torch.Generator().manual_seed(seed)
    parts = torch.randint(0, PARTS, (count, POINTS), generator=made)
    centers = torch.tensor([[0.0, 0.0, 0.8], [0.6, 0.0, -0.4], [-0.6, 0.3, -0.4]])[parts]
    points = centers + 0.4 * torch.randn(count, POINTS, 3, generator=made)
    lifted = 0.5 * torch.randn(count, 1, 1, generator=made) * torch.tensor([0.0, 0.0, 1.0])
    return TensorDataset(points + lifted, parts)


@torch.no_grad()
def accuracy(model, data, batch=8):
    model.network.eval()
    right = sum((model.network(x).argmax(-1) == y).sum().item() for x, y in DataLoader(data, batch))
    model.network.train()
    return right / data.tensors[1].numel()


def train(model, data, held_out, until):
    with watch(model.network, model.optimizer):
        while model._num_epochs < until:
            order = torch.Generator().manual_seed(1000 * SEED + model._num_epochs)
            for points, parts in DataLoader(data, BATCH, shuffle=True, generator=order):
                report_loss(model.optimize_parameters(points, parts))
            model._num_epochs += 1
            print(f"epoch {model._num_epochs}: accuracy {accuracy(model, held_out):.4f}")


if __name__ == "__main__":
    torch.manual_seed(SEED)
    data, held_out = scenes(64, 21), scenes(20, 22)
    model = SegmentationModel()
    with tempfile.TemporaryDirectory() as folder:
        train(model, data, held_out, 3)
        model.save(Path(folder) / "pointnet.pt")
        model = SegmentationModel()
        model.load(Path(folder) / "pointnet.pt")
    train(model, data, held_out, EPOCHS)
