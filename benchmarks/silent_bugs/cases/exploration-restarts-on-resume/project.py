"""DQN in a small windy grid. A checkpoint is written after each iteration; `--resume PATH` goes on from it."""

import argparse
import copy
import random
from pathlib import Path

import numpy as np
import torch
from case import BUG, SEED
from torch import nn


class WindyGrid:
    """A 6x6 grid; wind from the west now and then; the goal in the corner ends an episode with a reward of 1."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.at = np.array([self.rng.integers(6), self.rng.integers(3)])
        self.age = 0
        return self.observe()

    def observe(self):
        return [float(v) for v in np.concatenate([np.eye(6)[self.at[0]], np.eye(6)[self.at[1]]])]

    def step(self, action):
        self.at += [(0, 1), (0, -1), (1, 0), (-1, 0)][action]
        if self.rng.random() < 0.15:
            self.at[1] += 1
        self.at = self.at.clip(0, 5)
        self.age += 1
        done = bool((self.at == 5).all())
        return self.observe(), 1.0 if done else -0.02, done, self.age >= 40


class EpsilonGreedy:
    def __init__(self, initial=1.0, final=0.05, timesteps=160):
        self.initial, self.final, self.horizon, self.timesteps = initial, final, timesteps, 0

    @property
    def epsilon(self):
        return self.initial + min(self.timesteps / self.horizon, 1.0) * (self.final - self.initial)

    def act(self, q, obs):
        self.timesteps += 1
        if random.random() < self.epsilon:
            return random.randrange(4)
        with torch.no_grad():
            return int(q(torch.tensor([obs])).argmax())


class DQN:
    def __init__(self, args):
        self.args = args
        self.env = WindyGrid(args.seed + 1)
        self.q = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
        self.target = copy.deepcopy(self.q)
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=args.lr)
        self.exploration = EpsilonGreedy()
        self.replay = []
        self.iteration = self.updates = 0

    def learn(self):
        rows = random.sample(self.replay, self.args.batch_size)
        obs, action, reward, following, done = (torch.tensor(column) for column in zip(*rows, strict=True))
        value = self.q(obs).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.target(following).max(1).values
        loss = nn.functional.smooth_l1_loss(value, reward + self.args.gamma * best * ~done)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % 20 == 0:
            self.target.load_state_dict(self.q.state_dict())
        return loss.item()

    def train(self):
        losses, obs = [], self.env.observe()
        for _ in range(self.args.steps):
            action = self.exploration.act(self.q, obs)
            following, reward, done, too_long = self.env.step(action)
            self.replay.append((obs, action, reward, following, done))
            obs = self.env.reset() if done or too_long else following
            if len(self.replay) >= self.args.batch_size:
                losses.append(self.learn())
        self.iteration += 1
        return sum(losses) / max(len(losses), 1)

    @torch.no_grad()
    def evaluate(self, episodes=16):
        env, total = WindyGrid(seed=77), 0.0
        for _ in range(episodes):
            obs, over = env.reset(), False
            while not over:
                obs, reward, done, too_long = env.step(int(self.q(torch.tensor([obs])).argmax()))
                total, over = total + reward, done or too_long
        return total / episodes

    def save(self, path):
        state = {
            "networks": [part.state_dict() for part in (self.q, self.target, self.optimizer)],
            "replay": self.replay,
            "env": (self.env.at.tolist(), self.env.age, self.env.rng.bit_generator.state),
            "counts": (self.iteration, self.updates, self.exploration.timesteps),
            "random": random.getstate(),
        }
        torch.save(state, path)

    def restore(self, path):
        state = torch.load(path, weights_only=True)
        for part, saved in zip((self.q, self.target, self.optimizer), state["networks"], strict=True):
            part.load_state_dict(saved)
        self.replay = state["replay"]
        at, self.env.age, self.env.rng.bit_generator.state = state["env"]
        self.env.at = np.array(at)
        self.iteration, self.updates, timesteps = state["counts"]
        if not BUG:
            self.exploration.timesteps = timesteps
        random.setstate(state["random"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="of the environment, in one iteration")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    random.seed(args.seed)
    torch.manual_seed(args.seed)
    agent = DQN(args)
    if args.resume:
        agent.restore(args.resume)
    while agent.iteration < args.iterations:
        loss = agent.train()
        score = agent.evaluate()
        print(
            f"iteration {agent.iteration}: loss {loss:.5f} epsilon {agent.exploration.epsilon:.3f} return {score:.3f}"
        )
        agent.save(args.out / "checkpoint.pt")


if __name__ == "__main__":
    main()
