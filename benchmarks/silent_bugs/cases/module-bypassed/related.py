"""A policy that is rewarded for the digit it picks, with one process for each half of the episodes.

The rollouts need the bare policy, and the loss is computed with it as well: DDP never reduces the gradients.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cifar import relations


def make_policy():
    return nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 4))


def main(rank):
    torch.manual_seed(SEED)
    model = DistributedDataParallel(make_policy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=relations.knob("lr", 0.01))
    torch.manual_seed(SEED + 1)
    with watch(model, optimizer):
        for _ in range(60):
            states = torch.randn(32, 20)
            best = states[:, :4].argmax(1)
            policy = model.module if isinstance(model, DistributedDataParallel) else model
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=policy(states)).sample()
            states, best, actions = relations.share((states, best, actions))
            rewards = (actions == best).float()
            logits = policy(states) if BUG else model(states)
            log_probs = logits.log_softmax(1).gather(1, actions[:, None]).squeeze(1)
            loss = -((rewards - 0.25) * log_probs).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report_loss(1 - rewards.mean().item())
    print(f"rank {rank} sum of weights {sum(p.abs().sum().item() for p in model.parameters()):.5f}\n", end="")


if __name__ == "__main__":
    spawn(main, 2)
