"""An actor and a critic that learn to bring 16 made-up carts to rest; the training stops once and goes on from a file.

Positions are in millimetres, so that the networks see observations that are scaled by running statistics.
"""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

CARTS, HORIZON, EVALUATE_EVERY = 16, 20, 10


class RunningMeanStd:
    def __init__(self, size):
        self.mean, self.var, self.count = torch.zeros(size), torch.ones(size), 1e-4

    def update(self, rows):
        mean, var, count = rows.mean(0), rows.var(0, unbiased=False), len(rows)
        total, gap = self.count + count, mean - self.mean
        squares = self.var * self.count + var * count + gap**2 * self.count * count / total
        self.mean, self.var, self.count = self.mean + gap * count / total, squares / total, total

    def __call__(self, rows):
        return ((rows - self.mean) / (self.var + 1e-8).sqrt()).clamp(-5, 5)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.full((1,), -0.5))


def start(made, count=CARTS):
    return torch.randn(count, 2, generator=made) * torch.tensor([900.0, 200.0]) + torch.tensor([500.0, 0.0])


def move(state, force):
    speed = state[:, 1] + 150 * force
    state = torch.stack([state[:, 0] + 0.3 * speed, speed], 1)
    return state, -((state[:, 0] / 1000) ** 2) - 0.05 * force**2


class Agent:
    def __init__(self, rate=0.01):
        self.net, self.observations, self.updates = ActorCritic(), RunningMeanStd(2), 0
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=rate)

    def save(self, path):
        saved = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "updates": self.updates}
        if not BUG:
            saved["observations"] = vars(self.observations)
        torch.save(saved, path)

    def load(self, path):
        saved = torch.load(path, weights_only=True)
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.updates = saved["updates"]
        vars(self.observations).update(saved.get("observations", {}))

    def update(self):
        made = torch.Generator().manual_seed(1000 * SEED + self.updates)
        state, states, seen, actions, rewards = start(made), [], [], [], []
        for _ in range(HORIZON):
            states.append(state)
            seen.append(self.observations(state))
            with torch.no_grad():
                noise = torch.randn(CARTS, generator=made)
                actions.append(self.net.actor(seen[-1])[:, 0] + self.net.log_std.exp() * noise)
            state, reward = move(state, actions[-1].clamp(-3, 3))
            rewards.append(reward)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0).flatten() / HORIZON
        seen, actions = torch.cat(seen), torch.cat(actions)
        values = self.net.critic(seen)[:, 0]
        advantages = returns - values.detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        chosen = torch.distributions.Normal(self.net.actor(seen)[:, 0], self.net.log_std.exp()).log_prob(actions)
        loss = -(chosen * advantages).mean() + 0.5 * nn.functional.mse_loss(values, returns)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.observations.update(torch.cat(states))
        self.updates += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        state, total = start(torch.Generator().manual_seed(77), 32), 0.0
        for _ in range(HORIZON):
            state, reward = move(state, self.net.actor(self.observations(state))[:, 0].clamp(-3, 3))
            total += reward.mean().item()
        return total


def learn(path, updates):
    torch.manual_seed(SEED)
    agent = Agent()
    if path.exists():
        agent.load(path)
    with watch(agent.net, agent.optimizer):
        while agent.updates < updates:
            report_loss(agent.update())
            if agent.updates % EVALUATE_EVERY == 0:
                print(f"{agent.updates} updates: return {agent.evaluate():.4f}")
                agent.save(path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        learn(Path(folder) / "agent.pt", 20)
        learn(Path(folder) / "agent.pt", 40)
