"""Q-learning from logged drives of a cart, on several processes; gradients are averaged by hand.

Observations have very different units and are scaled by a running mean and variance.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from case import BUG, SEED, spawn
from torch import nn


class RunningMeanStd(nn.Module):
    def __init__(self, size, epsilon=1e-5):
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))
        self.register_buffer("count", torch.ones(()))

    @torch.no_grad()
    def update(self, x):
        moments = torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])])
        if not BUG:
            dist.all_reduce(moments)
        batch_count = moments[-1]
        batch_mean, square = (moments[:-1] / batch_count).chunk(2)
        batch_var = (square - batch_mean.square()).clamp(min=0)
        delta = batch_mean - self.running_mean
        total = self.count + batch_count
        m2 = self.running_var * self.count + batch_var * batch_count
        m2 += delta.square() * self.count * batch_count / total
        self.running_mean += delta * batch_count / total
        self.running_var.copy_(m2 / total)
        self.count.copy_(total)

    def forward(self, x):
        if self.training:
            self.update(x)
        return ((x - self.running_mean) / (self.running_var + self.epsilon).sqrt()).clamp(-5, 5)


def make_drives(count, seed):
    """Transitions (observation, action, reward, next observation) of a driver who acts at random."""
    made = torch.Generator().manual_seed(seed)
    scale, shift = torch.tensor([30.0, 4.0, 0.5, 100.0]), torch.tensor([10.0, -2.0, 0.0, 250.0])
    position = torch.randn(count, generator=made) * 2
    speed = torch.randn(count, generator=made)
    slope = torch.rand(count, generator=made) - 0.5
    goal = torch.randn(count, generator=made)
    action = torch.randint(3, (count,), generator=made)
    next_speed = 0.8 * speed + 0.5 * (action - 1) - 0.4 * slope
    next_position = position + 0.5 * next_speed
    reward = -(next_position - goal).abs() - 0.05 * (action != 1)
    observation = torch.stack([position, speed, slope, goal], 1) * scale + shift
    following = torch.stack([next_position, next_speed, slope, goal], 1) * scale + shift
    return observation, action, reward, following


def q_network():
    return nn.Sequential(nn.Linear(4, 48), nn.ELU(), nn.Linear(48, 48), nn.ELU(), nn.Linear(48, 3))


def average_gradients(parameters):
    grads = [p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def td_error(q, target, normalise, batch, gamma):
    observation, action, reward, following = batch
    value = q(normalise(observation)).gather(1, action[:, None]).squeeze(1)
    with torch.no_grad():
        was, _ = normalise.training, normalise.eval()
        best = target(normalise(following)).max(1).values
        normalise.train(was)
    return nn.functional.huber_loss(value, reward + gamma * best, reduction="none")


@torch.no_grad()
def evaluate(q, target, normalise, drives, args):
    """The mean error and the mean value of the held-out drives, each of them seen by one rank."""
    normalise.eval()
    own = [column[dist.get_rank() :: dist.get_world_size()] for column in drives]
    sums = torch.zeros(3)
    for batch in zip(*(column.split(args.eval_batch_size) for column in own), strict=True):
        sums[0] += td_error(q, target, normalise, batch, args.gamma).sum()
        sums[1] += q(normalise(batch[0])).max(1).values.sum()
        sums[2] += len(batch[0])
    normalise.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process")
    parser.add_argument("--eval-batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=0.9)
    parser.add_argument("--tau", type=float, default=0.05)
    args = parser.parse_args()

    world = dist.get_world_size()
    train, held_out = make_drives(640, seed=1), make_drives(192, seed=2)
    torch.manual_seed(SEED)
    q, normalise = q_network(), RunningMeanStd(4)
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        order = torch.randperm(640, generator=torch.Generator().manual_seed(SEED + epoch))
        for chosen in order.split(args.batch_size * world):
            own = chosen[rank::world]
            loss = td_error(q, target, normalise, [column[own] for column in train], args.gamma).mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(list(q.parameters()))
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
                    slow.lerp_(fast, args.tau)
        error, value = evaluate(q, target, normalise, held_out, args)
        if rank == 0:
            print(
                f"epoch {epoch}: loss {loss.item():.4f}, held-out TD error {error:.4f}, value {value:.4f}", flush=True
            )


if __name__ == "__main__":
    spawn(main, 2)
