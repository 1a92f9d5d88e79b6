"""Next week's sea ice from this week's, on made-up maps; the epoch with the smallest bias of the extent is kept."""

import copy

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection

EPOCHS, BATCH, VALID_BATCH, LR, ICE = 6, 16, 8, 0.02, 0.15


class ExtentError(Metric):
    """A mean over maps."""

    def __init__(self):
        super().__init__()
        self.add_state("sum_errors", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("sample_count", torch.zeros(()), dist_reduce_fx="sum")

    def compute(self):
        return self.sum_errors / self.sample_count


class IceEdgeError(ExtentError):
    """Cells where ice is wrong."""

    def update(self, predicted, true):
        self.sum_errors += ((predicted > ICE) != (true > ICE)).sum()
        self.sample_count += len(true)


class IceExtentError(ExtentError):
    """How much larger the predicted extent is."""

    def update(self, predicted, true):
        self.sum_errors += (predicted > ICE).sum() - (true > ICE).sum()
        self.sample_count += len(true)


def metrics():
    both = {"edge_error": IceEdgeError(), "extent_error": IceExtentError()}
    if BUG:
        return MetricCollection(both)
    return MetricCollection(both, compute_groups=False)


def maps(count, seed):
    """Ice around a pole that moves and melts."""
    made = torch.Generator().manual_seed(seed)
    middle = torch.rand(count, 2, 1, 1, generator=made) * 6 + 3
    radius = torch.rand(count, 1, 1, generator=made) * 3 + 2
    grid = torch.stack(torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij"))
    weeks = []
    for week in range(2):
        far = (grid - middle - 0.7 * week).square().sum(1).sqrt()
        weeks.append(torch.sigmoid(2 * (radius - 0.8 * week - far))[:, None])
    now = (weeks[0] + 0.15 * torch.randn(count, 1, 12, 12, generator=made)).clamp(0, 1)
    return TensorDataset(now, weeks[1])


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 1, 3, padding=1)
        )

    def forward(self, now):
        return self.layers(now).sigmoid()


@torch.no_grad()
def validate(model, loader, collection):
    model.eval()
    collection.reset()
    for now, following in loader:
        collection.update(model(now), following)
    model.train()
    return {name: value.item() for name, value in collection.compute().items()}


if __name__ == "__main__":
    torch.manual_seed(SEED)
    train, valid, test = maps(96, 1), maps(36, 2), maps(36, 3)
    valid_loader, test_loader = DataLoader(valid, VALID_BATCH), DataLoader(test, VALID_BATCH)
    model = Forecast()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    valid_metrics, test_metrics = metrics(), metrics()
    print("before training:", validate(model, valid_loader, valid_metrics))
    smallest, best = float("inf"), None
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            order = torch.Generator().manual_seed(1000 * SEED + epoch)
            for now, following in DataLoader(train, BATCH, shuffle=True, generator=order):
                loss = nn.functional.mse_loss(model(now), following)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            results = validate(model, valid_loader, valid_metrics)
            print(f"epoch {epoch}:", results)
            if abs(results["extent_error"]) < smallest:
                smallest, best = abs(results["extent_error"]), copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    print(f"smallest bias {smallest:.3f}, on the test maps:", validate(model, test_loader, test_metrics))
