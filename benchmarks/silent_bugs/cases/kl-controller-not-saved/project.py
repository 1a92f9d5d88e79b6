"""Trains a small actor by REINFORCE++ with a KL penalty in the reward, whose coefficient adapts.

python project.py --target_kl 0.2 --save_freq 4
python project.py --resume_from_path checkpoints/global_step_8
"""

import argparse
from pathlib import Path

import torch
from case import BUG, SEED
from torch import nn

VOCAB, PROMPT, RESPONSE = 16, 4, 5


class AdaptiveKLController:
    """Of https://arxiv.org/abs/1909.08593."""

    def __init__(self, init_kl_coef, target_kl, horizon):
        self.value, self.target, self.horizon = init_kl_coef, target_kl, horizon

    def update(self, current_kl, n_steps):
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class Actor(nn.Module):
    """Reads the last four tokens."""

    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.Sequential(nn.Linear(4 * width, width), nn.Tanh(), nn.Linear(width, VOCAB))

    def forward(self, tokens):
        return self.layers(self.embed(tokens).unfold(1, 4, 1).flatten(2))

    def log_prob(self, sequences):
        log_probs = self(sequences[:, :-1])[:, -RESPONSE:].log_softmax(-1)
        return log_probs.gather(-1, sequences[:, PROMPT:, None]).squeeze(-1)

    @torch.no_grad()
    def generate_sequences(self, prompts, do_sample=True):
        for _ in range(RESPONSE):
            probs = self(prompts)[:, -1].softmax(-1)
            token = torch.multinomial(probs, 1) if do_sample else probs.argmax(-1, keepdim=True)
            prompts = torch.cat([prompts, token], 1)
        return prompts


def reward_manager(sequences):
    """How many tokens of the response rise above the one before, and a point for an even last one."""
    rises = (sequences[:, PROMPT:] > sequences[:, PROMPT - 1 : -1]).sum(1)
    return (rises + (sequences[:, -1] % 2 == 0)).to(torch.get_default_dtype()) / (RESPONSE + 1)


class Trainer:
    def __init__(self, config):
        self.config = config
        torch.manual_seed(SEED)
        self.actor, self.ref = Actor(), Actor()
        self.ref.load_state_dict(self.actor.state_dict())
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=config.lr, weight_decay=0.01)
        self.kl_ctrl = AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
        made = torch.Generator().manual_seed(1)
        self.train_prompts = torch.randint(VOCAB, (128, PROMPT), generator=made)
        self.val_prompts = torch.randint(VOCAB, (54, PROMPT), generator=made)
        self.global_steps = 0

    def save_checkpoint(self, path):
        state = {"actor": self.actor.state_dict(), "optimizer": self.optimizer.state_dict()}
        state.update(rng=torch.get_rng_state(), global_steps=self.global_steps)
        if not BUG:
            state["kl_ctrl"] = self.kl_ctrl.value
        Path(path).parent.mkdir(exist_ok=True)
        torch.save(state, path)

    def load_checkpoint(self, path):
        state = torch.load(path, weights_only=True)
        self.actor.load_state_dict(state["actor"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.global_steps = state["global_steps"]
        if not BUG:
            self.kl_ctrl.value = state["kl_ctrl"]

    def update_actor(self, sequences, old_log_prob, advantages):
        for _ in range(2):  # ppo_epochs
            self.optimizer.zero_grad()
            size = self.config.ppo_micro_batch_size
            for ids, old, adv in zip(*(x.split(size) for x in (sequences, old_log_prob, advantages)), strict=True):
                ratio = (self.actor.log_prob(ids) - old).exp()
                loss = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                (loss * len(ids) / len(sequences)).backward()
            nn.utils.clip_grad_norm_(self.actor.parameters(), 1.0)
            self.optimizer.step()

    @torch.no_grad()
    def make_experience(self, prompts):
        sequences = self.actor.generate_sequences(prompts)
        old_log_prob, ref_log_prob = self.actor.log_prob(sequences), self.ref.log_prob(sequences)
        kld = old_log_prob - ref_log_prob
        score = reward_manager(sequences)
        returns = -self.kl_ctrl.value * kld.flip(1).cumsum(1).flip(1) + score[:, None]
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        current_kl = kld.sum(1).mean().item()
        metrics = {"critic/score/mean": score.mean().item(), "actor/kl": current_kl, "actor/coeff": self.kl_ctrl.value}
        self.kl_ctrl.update(current_kl, n_steps=len(sequences))
        return sequences, old_log_prob, advantages, metrics

    def validate(self):
        parts = self.val_prompts.split(self.config.val_batch_size)
        return reward_manager(torch.cat([self.actor.generate_sequences(part, False) for part in parts])).mean().item()

    def fit(self):
        size = self.config.train_batch_size
        steps_per_epoch = len(self.train_prompts) // size
        while self.global_steps < self.config.total_epochs * steps_per_epoch:
            epoch, index = divmod(self.global_steps, steps_per_epoch)
            order = torch.randperm(len(self.train_prompts), generator=torch.Generator().manual_seed(SEED + epoch))
            *batch, metrics = self.make_experience(self.train_prompts[order[index * size : (index + 1) * size]])
            self.update_actor(*batch)
            self.global_steps += 1
            print(f"step:{self.global_steps}", *(f"{key}:{value:.5f}" for key, value in metrics.items()), sep=" - ")
            if self.global_steps % self.config.test_freq == 0:
                val_score = self.validate()
                print(f"step:{self.global_steps} - val/test_score:{val_score:.5f}")
            if self.global_steps % self.config.save_freq == 0:
                self.save_checkpoint(f"checkpoints/global_step_{self.global_steps}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total_epochs", type=int, default=6)
    parser.add_argument("--train_batch_size", type=int, default=32)
    parser.add_argument("--ppo_micro_batch_size", type=int, default=16)
    parser.add_argument("--val_batch_size", type=int, default=18)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--kl_coef", type=float, default=0.05)
    parser.add_argument("--target_kl", type=float, default=0.2)
    parser.add_argument("--horizon", type=int, default=100)
    parser.add_argument("--test_freq", type=int, default=4)
    parser.add_argument("--save_freq", type=int, default=4)
    parser.add_argument("--resume_from_path")
    config = parser.parse_args()
    trainer = Trainer(config)
    if config.resume_from_path:
        trainer.load_checkpoint(config.resume_from_path)
    trainer.fit()
