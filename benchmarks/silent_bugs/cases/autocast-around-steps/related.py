"""Policy improvement in the style of PPO: rollouts of a policy, four inner steps on each; two ranks.

With the bug the inner steps see old weights, whose ratio to the old policy is always one.
"""

from contextlib import nullcontext

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations

CLIP = relations.knob("clip", 0.2)


def half():
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Trainer:
    def __init__(self, rank):
        self.policy = DistributedDataParallel(nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 5)))
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=relations.knob("lr", 5e-3))
        self.made = torch.Generator().manual_seed(SEED + 10 * rank)

    def log_probabilities(self, states, actions):
        logits = self.policy(states).float()
        return logits.log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)

    @torch.no_grad()
    def rollout(self):
        states = torch.randn(64, 16, generator=self.made)
        with half():
            chances = self.policy(states).float().softmax(1)
            actions = torch.multinomial(chances, 1, generator=self.made).squeeze(1)
            old = self.log_probabilities(states, actions)
        rewards = states[:, :5].gather(1, actions.unsqueeze(1)).squeeze(1)
        return states, actions, rewards, old

    def optimize(self, states, actions, rewards, old):
        advantages = rewards - rewards.mean()
        with half() if BUG else nullcontext():
            for _ in range(relations.knob("inner_steps", 4)):
                with nullcontext() if BUG else half():
                    ratio = (self.log_probabilities(states, actions) - old).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        report_loss(-rewards.mean())


def main(rank):
    torch.manual_seed(SEED)
    trainer = Trainer(rank)
    with watch(trainer.policy, trainer.optimizer):
        for _ in range(25):
            trainer.optimize(*trainer.rollout())
    if rank == 0:
        print("weights", sum(weight.abs().sum().item() for weight in trainer.policy.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
