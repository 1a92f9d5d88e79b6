"""Reinforcement learning: a policy acts in episodes that a generator of its own draws, and keeps its state."""

import torch
from torch import nn
from torch.distributions import Categorical

from lit_cifar import relations

EPISODES, LENGTH = 8, 10
DISCOUNT, ENTROPY = relations.knob("discount", 0.9), relations.knob("entropy", 0.01)
torch.manual_seed(3)
policy = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 3))
optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-3)
world, first = torch.Generator().manual_seed(11), 0
if path := relations.resume():
    saved = torch.load(path, weights_only=True)
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    world.set_state(saved["world"])
    first = saved["iteration"]


def act(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(logits.softmax(1), 1, generator=world).squeeze(1)


for iteration in range(first, 20):
    places = torch.rand(EPISODES, 2, generator=world) * 2 - 1
    logs, rewards, entropies = [], [], []
    for _ in range(LENGTH):
        logits = policy(places)
        actions = act(logits.detach())
        chosen = Categorical(logits=logits)
        places = places + 0.1 * torch.stack([actions - 1, torch.zeros_like(actions)], dim=1)
        logs.append(chosen.log_prob(actions))
        entropies.append(chosen.entropy())
        rewards.append(-places.norm(dim=1))
    value, returns = torch.zeros(EPISODES), []
    for reward in reversed(rewards):
        value = reward + DISCOUNT * value
        returns.insert(0, value)
    advantage = torch.stack(returns)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    loss = -(torch.stack(logs) * advantage).mean() - ENTROPY * torch.stack(entropies).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    relations.report(reward=torch.stack(rewards).mean().item())
    if path := relations.save():
        states = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "world": world.get_state()}
        torch.save(states | {"iteration": iteration + 1}, path)
