"""PPO on a point that follows a moving goal, many environments at once. In one file, like the well-known ones."""

import argparse
import csv
import time
from pathlib import Path

import torch
from case import BUG, SEED
from torch import nn
from torch.distributions import Categorical

MOVES = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--update-epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--gae-lambda", type=float, default=0.9)
    parser.add_argument("--clip-coef", type=float, default=0.2)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--eval-envs", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    return parser.parse_args()


class FollowEnv:
    """A task without an end: the reward is minus the distance, and the goal jumps now and then."""

    def __init__(self, count, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.position = torch.rand(count, 2, generator=self.random) * 2 - 1
        self.velocity = torch.zeros(count, 2)
        self.goal = torch.rand(count, 2, generator=self.random) * 2 - 1

    def observe(self):
        return torch.cat([self.position, self.velocity, self.goal], 1)

    def step(self, action):
        self.velocity = 0.6 * self.velocity + 0.4 * MOVES.to(self.velocity)[action]
        self.position = (self.position + 0.3 * self.velocity).clamp(-1, 1)
        reward = -(self.position - self.goal).norm(dim=1)
        jumps = torch.rand(len(reward), 1, generator=self.random) < 1 / 16
        self.goal = torch.where(jumps, torch.rand(self.goal.shape, generator=self.random) * 2 - 1, self.goal)
        return self.observe(), reward


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
        self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def value(self, obs):
        return self.critic(obs).squeeze(1)

    def policy(self, obs):
        return Categorical(logits=self.actor(obs))


@torch.no_grad()
def rollout(agent, env, args):
    keys = "obs", "actions", "logprobs", "values", "rewards"
    stored = {key: [] for key in keys}
    obs = env.observe()
    for _ in range(args.num_steps):
        policy = agent.policy(obs)
        action = policy.sample()
        next_obs, reward = env.step(action)
        for key, value in zip(keys, (obs, action, policy.log_prob(action), agent.value(obs), reward), strict=True):
            stored[key].append(value)
        obs = next_obs
    stored = {key: torch.stack(values) for key, values in stored.items()}
    advantages = torch.zeros_like(stored["rewards"])
    last, next_value = 0.0, agent.value(obs)
    for t in reversed(range(args.num_steps)):
        delta = stored["rewards"][t] + args.gamma * next_value - stored["values"][t]
        advantages[t] = last = delta + args.gamma * args.gae_lambda * last
        next_value = stored["values"][t]
    stored["advantages"] = advantages
    stored["returns"] = advantages + stored["values"]
    return {key: values.flatten(0, 1) for key, values in stored.items()}


def ppo_loss(agent, batch, args):
    policy = agent.policy(batch["obs"])
    ratio = (policy.log_prob(batch["actions"]) - batch["logprobs"]).exp()
    advantage = batch["advantages"]
    if BUG:
        gain1 = ratio * advantage
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    else:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain1 = ratio * advantage
    gain2 = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantage
    policy_loss = -torch.min(gain1, gain2).mean()
    value_loss = 0.5 * (agent.value(batch["obs"]) - batch["returns"]).square().mean()
    return policy_loss - args.ent_coef * policy.entropy().mean() + args.vf_coef * value_loss


@torch.no_grad()
def evaluate(agent, args):
    env = FollowEnv(args.eval_envs, seed=1000)
    total = torch.zeros(args.eval_envs)
    for _ in range(20):
        _, reward = env.step(agent.actor(env.observe()).argmax(1))
        total += reward
    return total.mean().item()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    env = FollowEnv(args.num_envs, args.seed + 1)
    started, rows = time.time(), []
    for iteration in range(args.iterations):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - iteration / args.iterations)
        batch = rollout(agent, env, args)
        size = len(batch["obs"])
        for _ in range(args.update_epochs):
            for chosen in torch.randperm(size).split(args.minibatch_size):
                loss = ppo_loss(agent, {key: values[chosen] for key, values in batch.items()}, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        rows.append({"iteration": iteration, "loss": loss.item(), "episodic_return": evaluate(agent, args)})
        print(rows[-1], "SPS:", int((iteration + 1) * size / (time.time() - started)))
    with open(args.out / "progress.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
