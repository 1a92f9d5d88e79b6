"""Soft actor-critic with a learned entropy coefficient; trains in sessions, each goes on from the file of the last.

python project.py --total-timesteps 768 --session-timesteps 384 [--load logs/sac.pt]
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn


class PointMass:
    """Four masses on a line that are to be brought to the middle; an episode has 16 steps."""

    def reset(self, generator=None):
        self.state, self.time = 2 * torch.rand(4, 2, generator=generator) - 1, 0
        return self.state.clone()

    def step(self, action):
        speed = 0.9 * self.state[:, 1] + 0.3 * action[:, 0]
        position = self.state[:, 0] + 0.3 * speed
        self.state, self.time = torch.stack([position, speed], 1), self.time + 1
        reward = -(position**2) - 0.1 * speed**2 - 0.01 * action[:, 0] ** 2
        return self.state.clone(), reward, self.time == 16


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def q_values(critic, obs, action):
    return torch.stack([qf(torch.cat([obs, action], 1)) for qf in critic])


class SAC:
    state_dicts = ("actor", "critic", "critic_target", "actor_optimizer", "critic_optimizer", "ent_coef_optimizer")
    tensors = ("log_ent_coef",)

    def __init__(self, args):
        self.env, self.num_timesteps, self.batch_size = PointMass(), 0, args.batch_size
        self.actor = mlp(2, 2)
        self.critic, self.critic_target = (nn.ModuleList([mlp(3, 1), mlp(3, 1)]) for _ in range(2))
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.log_ent_coef = torch.zeros(1, requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.lr)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=args.lr)
        self.ent_coef_optimizer = torch.optim.Adam([self.log_ent_coef], lr=args.lr)
        self.last_obs, self.buffer = self.env.reset(), []

    def act(self, obs):
        mean, log_std = self.actor(obs).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        sample = normal.rsample()
        log_prob = normal.log_prob(sample) - 2 * (0.6931 - sample - F.softplus(-2 * sample))
        return torch.tanh(sample), log_prob

    def collect_rollouts(self):
        for _ in range(4):
            action = self.act(self.last_obs)[0].detach()
            obs, reward, ended = self.env.step(action)
            self.buffer.append((self.last_obs, action, reward, obs))
            self.last_obs = self.env.reset() if ended else obs
            self.num_timesteps += len(obs)

    @staticmethod
    def update(optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def train(self):
        obs, action, reward, next_obs = (torch.cat(column) for column in zip(*self.buffer, strict=True))
        for _ in range(2):
            rows = torch.randint(len(obs), (self.batch_size,))
            new_action, log_prob = self.act(obs[rows])
            ent_coef = self.log_ent_coef.detach().exp()
            ent_coef_loss = -(self.log_ent_coef * (log_prob - 1.0).detach()).mean()  # the target entropy is -1
            self.update(self.ent_coef_optimizer, ent_coef_loss)
            with torch.no_grad():  # an episode ends by its time alone, so that each next state has a value
                next_action, next_log_prob = self.act(next_obs[rows])
                value = q_values(self.critic_target, next_obs[rows], next_action).amin(0) - ent_coef * next_log_prob
                target = reward[rows, None] + 0.95 * value
            critic_loss = 0.5 * sum(F.mse_loss(q, target) for q in q_values(self.critic, obs[rows], action[rows]))
            self.update(self.critic_optimizer, critic_loss)
            actor_loss = (ent_coef * log_prob - q_values(self.critic, obs[rows], new_action).amin(0)).mean()
            self.update(self.actor_optimizer, actor_loss)
            for slow, fast in zip(self.critic_target.parameters(), self.critic.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.05)
        return {"ent_coef": ent_coef.item(), "critic_loss": critic_loss.item()}

    def learn(self, until):
        while self.num_timesteps < until:
            self.collect_rollouts()
            log = self.train()
            if self.num_timesteps % 96 == 0:
                print(self.num_timesteps, log, "mean_reward", self.evaluate(PointMass()))

    @torch.no_grad()
    def evaluate(self, env):
        obs, total, ended = env.reset(torch.Generator().manual_seed(5)), 0.0, False
        while not ended:
            obs, reward, ended = env.step(torch.tanh(self.actor(obs)[:, :1]))
            total += reward.mean().item()
        return total

    def save(self, path):
        file = {name: getattr(self, name).state_dict() for name in self.state_dicts}
        file |= {name: getattr(self, name) for name in self.tensors}
        file |= {"num_timesteps": self.num_timesteps, "buffer": self.buffer, "last_obs": self.last_obs}
        torch.save(file | {"env": (self.env.state, self.env.time), "rng": torch.get_rng_state()}, path)

    def load(self, path):
        file = torch.load(path, weights_only=True)
        for name in self.state_dicts:
            getattr(self, name).load_state_dict(file[name])
        for name in self.tensors:
            if BUG:
                setattr(self, name, file[name])
            else:
                getattr(self, name).data.copy_(file[name].data)
        self.num_timesteps, self.buffer, self.last_obs = file["num_timesteps"], file["buffer"], file["last_obs"]
        self.env.state, self.env.time = file["env"]
        torch.set_rng_state(file["rng"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-timesteps", type=int, default=768)
    parser.add_argument("--session-timesteps", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--load", help="a file of an earlier session")
    args = parser.parse_args()
    Path("logs").mkdir(exist_ok=True)
    torch.manual_seed(SEED)
    path, done = args.load, 0
    while done < args.total_timesteps:
        model = SAC(args)
        if path is not None:
            model.load(path)
        model.learn((model.num_timesteps // args.session_timesteps + 1) * args.session_timesteps)
        path, done = "logs/sac.pt", model.num_timesteps
        model.save(path)


if __name__ == "__main__":
    main()
