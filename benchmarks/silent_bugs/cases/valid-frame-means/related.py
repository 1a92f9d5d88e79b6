"""A recurrent network that labels the voiced frames of utterances of very different lengths.

The validation loss should be the mean over all voiced frames. It is the mean over batches of their means, so a frame
of a batch with few of them weighs more.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from lit_cifar import relations

UNVOICED = -100


def make_utterances(count, seed):
    made = torch.Generator().manual_seed(seed)
    frames = torch.randn(count, 16, 6, generator=made)
    labels = (frames[..., 0] > frames[..., 1]).long() + 2 * (frames[..., 2] > 1).long()
    lengths = torch.randint(1, 17, (count,), generator=made)
    labels[torch.arange(16) >= lengths[:, None]] = UNVOICED
    return TensorDataset(frames, labels)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(6, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, frames):
        return self.head(self.rnn(frames)[0]).flatten(0, 1)


@torch.no_grad()
def validate(model, loader):
    losses, loss_sum, voiced = [], 0.0, 0
    for frames, labels in loader:
        summed = nn.functional.cross_entropy(model(frames), labels.flatten(), ignore_index=UNVOICED, reduction="sum")
        batch_sums = torch.stack([summed, (labels != UNVOICED).sum().float()])
        dist.all_reduce(batch_sums)
        losses.append(batch_sums[0] / batch_sums[1])
        loss_sum, voiced = loss_sum + batch_sums[0], voiced + batch_sums[1]
    return (torch.stack(losses).mean() if BUG else loss_sum / voiced).item()


def main(rank):
    torch.manual_seed(SEED)
    train, val = make_utterances(96, seed=1), make_utterances(24, seed=2)
    train_loader = DataLoader(Subset(train, range(rank, 96, dist.get_world_size())), batch_size=6)
    val_loader = DataLoader(Subset(val, range(rank, 24, dist.get_world_size())), batch_size=2)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 0.01))
    with watch(model, optimizer):
        for epoch in range(4):
            for frames, labels in train_loader:
                loss = nn.functional.cross_entropy(model(frames), labels.flatten(), ignore_index=UNVOICED)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
            if epoch % relations.knob("validate_every", 1) == 0:
                val_loss = validate(model.module, val_loader)
                relations.report(val_loss=val_loss)
                if rank == 0:
                    print(f"epoch {epoch}: val_loss {val_loss:.4f}")


if __name__ == "__main__":
    spawn(main, 2)
