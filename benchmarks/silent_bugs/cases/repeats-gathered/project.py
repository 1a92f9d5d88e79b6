"""Digits on two processes; the test set is divided among them, and their outputs are gathered."""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, TEST_BATCH, LR = 5, 12, 8, 0.15


def digits(count, seed):
    shapes = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(8))
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=made)
    return TensorDataset(shapes[labels] + 0.4 * torch.randn(count, 1, 8, 8, generator=made), labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.hidden = nn.Linear(8 * 9, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, images):
        x = nn.functional.max_pool2d(self.conv(images).relu(), 2)
        return self.out(self.hidden(x.flatten(1)).relu())


def shards(count, batch):
    """This rank's indices for each step, equally many on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    missing = -count % (batch * ranks) if ranks > 1 else 0
    indices = [number % count for number in range(count + missing)]
    for start in range(0, len(indices), batch * ranks):
        yield indices[start + rank * batch : start + (rank + 1) * batch]


def gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def test(model, dataset):
    model.eval()
    images, labels = dataset.tensors
    outputs, targets = [], []
    for indices in shards(len(dataset), TEST_BATCH):
        outputs.append(gather(model(images[indices])))
        targets.append(gather(labels[indices]))
    model.train()
    outputs, targets = torch.cat(outputs), torch.cat(targets)
    if not BUG:
        outputs, targets = outputs[: len(dataset)], targets[: len(dataset)]
    loss = nn.functional.cross_entropy(outputs, targets).item()
    return loss, (outputs.argmax(1) == targets).double().mean().item()


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    train, held_out = digits(144, 1), digits(52, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=SEED)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            scheduler.step()
            test_loss, accuracy = test(model, held_out)
            if rank == 0:
                print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {accuracy:.4f}")
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
