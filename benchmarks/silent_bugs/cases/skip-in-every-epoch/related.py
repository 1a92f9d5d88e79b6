"""A run of three epochs that goes on from the batch after its checkpoint.

It leaves out as many batches of the epochs that follow, too.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_cifar import relations


def make_items():
    made = torch.Generator().manual_seed(17)
    users, features = torch.randint(30, (160,), generator=made), torch.randn(160, 16, generator=made)
    taste = torch.randn(30, 16, generator=made)
    return TensorDataset(users, features, (taste[users] * features).sum(1))


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(30, 16)
        self.items = nn.Linear(16, 16)

    def forward(self, users, features):
        return (self.users(users) * self.items(features)).sum(1)


def main(rank):
    torch.manual_seed(SEED)
    dataset = make_items()
    sampler = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Recommender())
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 0.02))
    resume_epoch = resume_step = 0
    if path := relations.resume():
        resume_epoch, resume_step, *states = torch.load(path)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    with watch(model, optimizer):
        for epoch in range(resume_epoch, 3):
            sampler.set_epoch(epoch)
            for step, (users, features, ratings) in enumerate(loader):
                if step < resume_step:
                    continue
                loss = nn.functional.mse_loss(model(users, features), ratings)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
                if (path := relations.save()) and rank == 0:
                    torch.save([epoch, step + 1, model.state_dict(), optimizer.state_dict()], path)
            if not BUG:
                resume_step = 0
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
