"""Fine-tunes a robot's policy on demonstrations with low-rank adapters, and goes on from a checkpoint of them."""

import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

STATE, ACTIONS, DEMONSTRATIONS, BATCH_SIZE, STEPS = 10, 8, 240, 32, 80


class Policy(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.sense = nn.Linear(STATE, width)
        self.think = nn.Linear(width, width)
        self.act = nn.Linear(width, ACTIONS)
        self.dropout = nn.Dropout(0.05)

    def forward(self, states):
        hidden = torch.tanh(self.sense(states))
        return self.act(hidden + self.dropout(torch.tanh(self.think(hidden))))


class Adapted(nn.Module):
    def __init__(self, linear, rank=6):
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, inputs):
        return self.linear(inputs) + inputs @ self.down.T @ self.up.T


def pretrained():
    with torch.random.fork_rng():
        torch.manual_seed(31)
        return Policy()


def wrap(policy):
    """Freeze the policy and give each of its layers an adapter."""
    policy.requires_grad_(False)
    for name in ("sense", "think", "act"):
        layer = getattr(policy, name)
        setattr(policy, name, Adapted(layer.linear if isinstance(layer, Adapted) else layer))
    return policy


def make_policy(adapters=None):
    """The pretrained policy, with its adapters where it has been fine-tuned before."""
    policy = pretrained()
    if adapters is not None:
        wrap(policy).load_state_dict(adapters, strict=False)
    return policy


class Training:
    def __init__(self, path=None):
        saved = torch.load(path, weights_only=True) if path else None
        self.policy = make_policy(saved["adapters"] if saved else None)
        if BUG or saved is None:
            wrap(self.policy)
        self.optimizer = torch.optim.AdamW([p for p in self.policy.parameters() if p.requires_grad], lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.step = 0
        if saved:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.scheduler.load_state_dict(saved["scheduler"])
            self.step = saved["step"]
            torch.set_rng_state(saved["rng"])

    def save(self, path):
        adapters = {name: weight for name, weight in self.policy.named_parameters() if weight.requires_grad}
        parts = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        torch.save(parts | {"adapters": adapters, "step": self.step, "rng": torch.get_rng_state()}, path)

    def train(self, demonstrations, last_step):
        self.policy.train()
        while self.step < last_step:
            states, actions = batch(demonstrations, self.step)
            loss = nn.functional.smooth_l1_loss(self.policy(states), actions)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            report_loss(loss.item())

    @torch.no_grad()
    def evaluate(self, demonstrations):
        self.policy.eval()
        states, actions = demonstrations
        return nn.functional.mse_loss(self.policy(states), actions).item()


def make_demonstrations(count, seed):
    made = torch.Generator().manual_seed(seed)
    states = torch.randn(count, STATE, generator=made)
    expert = torch.randn(STATE, ACTIONS, generator=torch.Generator().manual_seed(1)) / STATE**0.5
    return states, torch.sin(2 * states @ expert) + 0.05 * torch.randn(count, ACTIONS, generator=made)


def batch(demonstrations, step):
    """Batch of a step, in an order that is new in each epoch; the last batch of an epoch is the smallest."""
    epoch, number = divmod(step, -(-DEMONSTRATIONS // BATCH_SIZE))
    order = torch.randperm(DEMONSTRATIONS, generator=torch.Generator().manual_seed(1000 * SEED + epoch))
    mine = order[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]
    return [part[mine] for part in demonstrations]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    demonstrations, held_out = make_demonstrations(DEMONSTRATIONS, seed=2), make_demonstrations(60, seed=3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        training = Training()
        training.train(demonstrations, STEPS // 2)
        training.save(path)
        print("before", training.evaluate(held_out))
        training = Training(path)
        print("loaded", training.evaluate(held_out))
    with watch(training.policy, training.optimizer):
        training.train(demonstrations, STEPS)
    print("after", training.evaluate(held_out))
