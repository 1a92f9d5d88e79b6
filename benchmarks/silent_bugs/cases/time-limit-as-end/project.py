"""PPO keeps sixteen carts near the middle of their track; an episode is cut after twelve steps."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.distributions import Normal

CARTS, ROLLOUT, TIME_LIMIT, GAMMA, LAMBDA = 16, 20, 12, 0.97, 0.95


class Track:
    def __init__(self, made):
        self.made = made
        self.state, self.steps = self.start(), torch.zeros(CARTS)

    def start(self):
        return torch.randn(CARTS, 2, generator=self.made) * 0.4

    def step(self, action):
        speed = self.state[:, 1] + 0.2 * action.clamp(-1, 1) + 0.05 * torch.randn(CARTS, generator=self.made)
        reached = torch.stack([self.state[:, 0] + 0.3 * speed, speed], 1)
        self.steps = self.steps + 1
        terminated = reached[:, 0].abs() > 1.2
        truncated = (self.steps >= TIME_LIMIT) & ~terminated
        done = terminated | truncated
        self.state = torch.where(done[:, None], self.start(), reached)
        self.steps = torch.where(done, 0, self.steps)
        return reached, 1 - reached[:, 0].square(), terminated, truncated


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.full((1,), -0.5))

    def forward(self, states):
        return Normal(self.policy(states)[..., 0], self.log_std.exp()), self.critic(states)[..., 0]


def advantages_of(rewards, values, values_reached, terminated, truncated):
    """Generalised advantages; a recursion stops where an episode stops."""
    ended = terminated | truncated if BUG else terminated
    steps = rewards + GAMMA * values_reached * ~ended - values
    goes_on = ~(terminated | truncated)
    advantages, following = torch.zeros_like(steps), torch.zeros(CARTS)
    for t in reversed(range(ROLLOUT)):
        advantages[t] = following = steps[t] + GAMMA * LAMBDA * goes_on[t] * following
    return advantages


@torch.no_grad()
def collect(agent, made):
    """States, actions, log probabilities, advantages and returns of one rollout, steps and carts in one axis."""
    track, steps = Track(made), []
    for _ in range(ROLLOUT):
        state = track.state
        policy, value = agent(state)
        action = policy.mean + policy.stddev * torch.randn(CARTS, generator=made)
        reached, reward, terminated, truncated = track.step(action)
        value_reached = agent(reached)[1]
        steps.append((state, action, policy.log_prob(action), reward, value, value_reached, terminated, truncated))
    states, actions, log_probs, rewards, values, *rest = (torch.stack(part) for part in zip(*steps, strict=True))
    advantages = advantages_of(rewards, values, *rest)
    return [part.flatten(0, 1) for part in (states, actions, log_probs, advantages, advantages + values)]


def ppo_loss(agent, states, actions, log_probs, advantages, returns):
    policy, values = agent(states)
    ratio = (policy.log_prob(actions) - log_probs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return 0.5 * (values - returns).square().mean() - gain.mean() - 0.001 * policy.entropy().mean()


def train_iteration(agent, optimizer, iteration):
    made = torch.Generator().manual_seed(1000 * SEED + iteration)
    states, actions, log_probs, advantages, returns = collect(agent, made)
    advantages = (advantages - advantages.mean()) / advantages.std()
    rollout = states, actions, log_probs, advantages, returns
    for _ in range(2):
        for rows in torch.randperm(CARTS * ROLLOUT, generator=made).split(64):
            loss = ppo_loss(agent, *(part[rows] for part in rollout))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            report_loss(loss.item())


@torch.no_grad()
def evaluate(agent):
    """Mean reward of a step and mean value of the states, without noise in the actions."""
    track, rewards, values = Track(torch.Generator().manual_seed(5)), [], []
    for _ in range(50):
        policy, value = agent(track.state)
        rewards.append(track.step(policy.mean)[1])
        values.append(value)
    return torch.stack(rewards).mean().item(), torch.stack(values).mean().item()


def save(file, agent, optimizer, iteration):
    torch.save({"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}, file)


def load(file, agent, optimizer):
    saved = torch.load(file, weights_only=True)
    agent.load_state_dict(saved["agent"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["iteration"]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5)
    with tempfile.TemporaryDirectory() as folder, watch(agent, optimizer):
        file = Path(folder) / "agent.pt"
        start = load(file, agent, optimizer) if file.exists() else 0
        for iteration in range(start, 12):
            train_iteration(agent, optimizer, iteration)
            if iteration % 3 == 2:
                save(file, agent, optimizer, iteration + 1)
                print("iteration", iteration + 1, "reward and value", evaluate(agent))
