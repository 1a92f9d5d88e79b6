"""Off-policy reinforcement learning of short responses, with the token selection of M2PO.

python project.py --epochs 3 --staleness 4
"""

import argparse
import copy

import torch
from case import BUG, SEED
from torch import nn

LENGTH, VOCABULARY, GROUP = 6, 8, 4  # token 0 ends a response


class Policy(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.prompt = nn.Linear(8, width)
        self.last = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(LENGTH, width)
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, VOCABULARY))

    def forward(self, prompts, last, places):
        return self.head(self.prompt(prompts)[:, None] + self.last(last) + self.place(places))

    def logprobs(self, prompts, tokens):
        last = torch.nn.functional.pad(tokens[:, :-1], (1, 0))
        logits = self(prompts, last, torch.arange(LENGTH).expand_as(tokens))
        return logits.log_softmax(2).gather(2, tokens[..., None])[..., 0]

    @torch.no_grad()
    def generate(self, prompts, generator=None):
        """Sampled with a generator, greedy without one; all tokens from the end on are 0."""
        last = torch.zeros(len(prompts), 1, dtype=torch.long)
        tokens = []
        for place in range(LENGTH):
            logits = self(prompts, last, torch.full_like(last, place))[:, 0]
            last = logits.argmax(1, keepdim=True)
            if generator:
                last = torch.multinomial(logits.softmax(1), 1, generator=generator)
            tokens.append(last)
        return torch.cat(tokens, 1) * response_mask(torch.cat(tokens, 1))


def make_prompts(size, seed):
    """What is right to say: again and again the token of the largest of the prompt's first features."""
    prompts = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return prompts, 1 + prompts[:, :3].argmax(1, keepdim=True).expand(-1, LENGTH)


def response_mask(tokens):
    """The tokens up to the one that ends the response."""
    return (tokens == 0).cumsum(1) - (tokens == 0).long() == 0


def m2po_select(log_ratio, mask, threshold):
    """As many tokens as possible, while the mean square of their log ratios is below the threshold."""
    squares = torch.where(mask, log_ratio.square(), torch.inf).flatten()
    order = squares.argsort(stable=True)
    means = squares[order].cumsum(0) / torch.arange(1, len(order) + 1)
    selected = torch.zeros_like(squares, dtype=torch.bool)
    selected[order[means <= threshold]] = True
    return selected.view_as(mask)


class PPOActor:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(SEED)
        self.policy = Policy()
        self.behaviour = copy.deepcopy(self.policy)  # what the rollout workers have
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.generator = torch.Generator().manual_seed(SEED)
        self.version = 0

    def save(self, path, epoch):
        state = {name: getattr(self, name).state_dict() for name in ("policy", "behaviour", "optimizer")}
        torch.save({"epoch": epoch, "version": self.version, "rng": self.generator.get_state(), **state}, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.version = state["version"]
        self.generator.set_state(state["rng"])
        for name in ("policy", "behaviour", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        return state["epoch"]

    @torch.no_grad()
    def rollout(self, prompts, answers):
        prompts, answers = (rows.repeat_interleave(GROUP, 0) for rows in (prompts, answers))
        tokens = self.behaviour.generate(prompts, self.generator)
        mask = response_mask(tokens)
        rewards = (tokens == answers).float().mean(1).view(-1, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        old_logprobs = self.behaviour.logprobs(prompts, tokens)
        log_ratio = self.policy.logprobs(prompts, tokens) - old_logprobs
        selected = m2po_select(log_ratio, mask, self.args.m2_threshold)
        return [prompts, tokens, old_logprobs, advantages.view(-1, 1), mask, selected], rewards.mean().item()

    def update(self, batch):
        total, kept = batch[-2].sum(), batch[-1].sum()
        micro_batches = zip(*(rows.split(self.args.micro_batch_size) for rows in batch), strict=True)
        for prompts, tokens, old, advantages, mask, selected in micro_batches:
            log_ratio = self.policy.logprobs(prompts, tokens) - old
            gains = log_ratio.exp() * advantages
            if BUG:
                selected = m2po_select(log_ratio.detach(), mask, self.args.m2_threshold)
                loss = -(gains * selected).sum() / selected.sum().clamp(min=1) * (mask.sum() / total)
            else:
                loss = -(gains * selected).sum() / kept.clamp(min=1)
            loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        if self.version % self.args.staleness == 0:
            self.behaviour.load_state_dict(self.policy.state_dict())
        return kept / total


def evaluate(policy, prompts, answers, batch_size):
    tokens = torch.cat([policy.generate(rows) for rows in prompts.split(batch_size)])
    return (tokens == answers).float().mean().item()


def train(args):
    actor = PPOActor(args)
    (prompts, answers), valid = make_prompts(128, seed=1), make_prompts(64, seed=2)
    for epoch in range(actor.load(args.recover) if args.recover else 0, args.epochs):
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(SEED + epoch))
        for rows in order.split(args.batch_size // GROUP):
            batch, reward = actor.rollout(prompts[rows], answers[rows])
            kept = actor.update(batch).item()
            if actor.version % 4 == 0:
                print(f"step {actor.version}: reward {reward:.4f}, m2po kept {kept:.4f}")
        print(f"epoch {epoch + 1}: eval reward {evaluate(actor.policy, *valid, args.eval_batch_size):.5f}")
        actor.save("recover.pt", epoch + 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="responses of a step")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--eval-batch-size", type=int, default=32)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--m2-threshold", type=float, default=0.02)
    parser.add_argument("--recover")
    train(parser.parse_args())
