"""Trains a flow-matching policy on recorded episodes, on two processes.

python project.py --epochs 4
python project.py --checkpoint-path outputs/epoch_2.pt
"""

import argparse
import pathlib

import torch
import torch.distributed as dist
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STATE, CHUNK, ACTION = 6, 4, 2


class Episodes(Dataset):
    """States of an arm and the chunk of actions that follows; it reaches a goal from the left or from the right."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.states = torch.randn(size, STATE, generator=generator)
        side = torch.randint(0, 2, (size, 1, 1), generator=generator) * 2.0 - 1
        times = torch.linspace(0, 1, CHUNK)[:, None]
        way = self.states[:, None, :2] + times * (self.states[:, None, 2:4] - self.states[:, None, :2])
        self.actions = way + side * torch.sin(torch.pi * times) * torch.tensor([0.5, -0.5])

    def __len__(self):
        return len(self.states)

    def __getitem__(self, index):
        return self.states[index], self.actions[index]


class FlowPolicy(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(STATE + CHUNK * ACTION + 1, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, CHUNK * ACTION),
            nn.Unflatten(1, (CHUNK, ACTION)),
        )

    def forward(self, states, actions, noise, time):
        """The squared errors of the predicted velocities."""
        time = time[:, None, None]
        noisy = time * noise + (1 - time) * actions
        velocity = self.layers(torch.cat([states, noisy.flatten(1), time[:, 0]], 1))
        return (velocity - (noise - actions)).square().mean((1, 2))


def draw(size, generator=None):
    """Noise and times for a batch."""
    noise = torch.randn(size, CHUNK, ACTION, generator=generator)
    return noise, torch.rand(size, generator=generator)


class TrainState:
    def __init__(self, args):
        torch.manual_seed(SEED)
        self.policy = DistributedDataParallel(FlowPolicy())
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.epoch = 0
        torch.manual_seed(SEED + 1 + dist.get_rank())  # other noise in each process

    def parts(self):
        return {"policy": self.policy.module, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save_checkpoint(self, path):
        rng_states = [None] * dist.get_world_size()
        dist.all_gather_object(rng_states, torch.get_rng_state())
        if dist.get_rank() == 0:
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            state = {name: part.state_dict() for name, part in self.parts().items()}
            torch.save({"epoch": self.epoch, "rng_state": rng_states[0] if BUG else rng_states, **state}, path)
        dist.barrier()

    def load_checkpoint(self, path):
        state = torch.load(path, weights_only=True)
        self.epoch = state["epoch"]
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng_state"] if BUG else state["rng_state"][dist.get_rank()])
        if dist.get_rank() == 0:
            print(f"resumed from {path}")


@torch.no_grad()
def evaluate(policy, dataset, batch_size):
    """The loss over the validation episodes with noise that is always the same."""
    noise, time = draw(len(dataset), torch.Generator().manual_seed(3))
    sums = torch.zeros(2)
    rows = torch.arange(dist.get_rank(), len(dataset), dist.get_world_size())
    for part in rows.split(batch_size):
        losses = policy(*dataset[part], noise[part], time[part])
        sums += torch.stack([losses.sum(), torch.tensor(float(len(part)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def train(args, epochs):
    train_set, val_set = Episodes(192, seed=1), Episodes(64, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    state = TrainState(args)
    if args.checkpoint_path:
        state.load_checkpoint(args.checkpoint_path)
    while state.epoch < epochs:
        sampler.set_epoch(state.epoch)
        mean_loss = torch.zeros(1)
        for states, actions in loader:
            loss = state.policy(states, actions, *draw(len(states))).mean()
            state.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(state.policy.parameters(), 1.0)
            state.optimizer.step()
            mean_loss += loss.detach() / len(loader) / dist.get_world_size()
        state.scheduler.step()
        state.epoch += 1
        dist.all_reduce(mean_loss)
        val_loss = evaluate(state.policy.module, val_set, args.val_batch_size)
        if dist.get_rank() == 0:
            print(f"epoch {state.epoch}: train loss {mean_loss.item():.5f}, val loss {val_loss:.5f}")
        state.save_checkpoint(f"outputs/epoch_{state.epoch}.pt")


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--val-batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--checkpoint-path", help="goes on from there")
    parser.add_argument("--job-epochs", type=int, default=2, help="the first job has time for so many")
    args = parser.parse_args()
    if args.job_epochs and not args.checkpoint_path:
        train(args, args.job_epochs)
        args.checkpoint_path = f"outputs/epoch_{args.job_epochs}.pt"
    train(args, args.epochs)


if __name__ == "__main__":
    spawn(main, 2)
