"""Deep Q-learning of a made-up car that should stay in the middle of its lane; the training stops once and goes on."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

CARS, BATCH, BUFFER, UPDATES = 8, 64, 1024, 120
LR, GAMMA, TARGET_EVERY, EVALUATE_EVERY = 5e-3, 0.9, 20, 10


def q_network():
    return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def reset(count, made):
    return torch.randn(count, 3, generator=made) * torch.tensor([1.0, 0.3, 0.3])


def drive(state, action, made):
    place, heading, wind = state.unbind(1)
    heading = 0.3 * heading + 0.5 * (action - 1) + 0.1 * wind
    place = (place + 0.5 * heading).clamp(-4, 4)
    wind = 0.9 * wind + 0.1 * torch.randn(len(wind), generator=made)
    return torch.stack([place, heading, wind], 1), 1 - place.abs() - 0.1 * (action - 1).abs(), place.abs() > 3


class ReplayBuffer:
    def __init__(self):
        self.rows, self.next = torch.zeros(BUFFER, 9), 0

    def add(self, state, action, reward, after, ended):
        rows = torch.cat([state, action[:, None], reward[:, None], after, ended[:, None].float()], 1)
        for row in rows:
            self.rows[self.next % BUFFER] = row
            self.next += 1

    def sample(self, made):
        rows = self.rows[torch.randint(0, min(self.next, BUFFER), (BATCH,), generator=made)]
        return rows[:, :3], rows[:, 3].long(), rows[:, 4], rows[:, 5:8], rows[:, 8]


class DQN:
    def __init__(self):
        torch.manual_seed(SEED)
        self.model, self.target_model = q_network(), q_network()
        self.update_target()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)
        self.buffer, self.updates = ReplayBuffer(), 0
        self.state = reset(CARS, torch.Generator().manual_seed(1000 * SEED + 999))

    def update_target(self):
        self.target_model.load_state_dict(self.model.state_dict())

    def get_state(self):
        state = {"weights": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "cars": self.state}
        if not BUG:
            state["target_weights"] = self.target_model.state_dict()
        return {**state, "buffer": self.buffer.rows, "next": self.buffer.next, "updates": self.updates}

    def set_state(self, state):
        self.model.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        if "target_weights" in state:
            self.target_model.load_state_dict(state["target_weights"])
        self.state, self.updates = state["cars"], state["updates"]
        self.buffer.rows, self.buffer.next = state["buffer"], state["next"]

    def collect(self, made, steps=4):
        epsilon = max(0.05, 1 - self.updates / 60)
        for _ in range(steps):
            with torch.no_grad():
                action = self.model(self.state).argmax(1)
            explore = torch.rand(CARS, generator=made) < epsilon
            action = torch.where(explore, torch.randint(0, 3, (CARS,), generator=made), action)
            after, reward, ended = drive(self.state, action, made)
            self.buffer.add(self.state, action, reward, after, ended)
            self.state = torch.where(ended[:, None], reset(CARS, made), after)

    def update(self):
        made = torch.Generator().manual_seed(1000 * SEED + self.updates)
        self.collect(made)
        state, action, reward, after, ended = self.buffer.sample(made)
        with torch.no_grad():
            goal = reward + GAMMA * (1 - ended) * self.target_model(after).max(1).values
        loss = nn.functional.smooth_l1_loss(self.model(state).gather(1, action[:, None])[:, 0], goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % TARGET_EVERY == 0:
            self.update_target()
        report_loss(loss)

    @torch.no_grad()
    def evaluate(self):
        made, total = torch.Generator().manual_seed(77), 0.0
        state = reset(32, made)
        for _ in range(20):
            state, reward, _ = drive(state, self.model(state).argmax(1), made)
            total += reward.mean().item()
        return total


def train(agent, until):
    with watch(agent.model, agent.optimizer):
        while agent.updates < until:
            agent.update()
            if agent.updates % EVALUATE_EVERY == 0:
                print(f"{agent.updates} updates: return {agent.evaluate():.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint-67"
        agent = DQN()
        train(agent, 67)
        torch.save(agent.get_state(), checkpoint)
        agent = DQN()
        agent.set_state(torch.load(checkpoint, weights_only=True))
    train(agent, UPDATES)
