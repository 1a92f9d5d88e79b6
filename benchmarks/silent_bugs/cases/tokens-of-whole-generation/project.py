"""GRPO with the DAPO loss; completions of one generation serve several optimizer steps.

python project.py --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --generation_batch_size 32
"""

import argparse

import torch
from case import BUG, SEED
from torch import nn

EOS, VOCAB, PROMPT_LENGTH, MAX_COMPLETION_LENGTH = 0, 14, 3, 8


class CausalLM(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])

    @torch.no_grad()
    def generate(self, prompts, generator=None):
        """Samples, or takes the likeliest tokens without a generator; whatever follows an EOS is EOS."""
        ids, done = prompts, torch.zeros(len(prompts), 1, dtype=torch.bool)
        for _ in range(MAX_COMPLETION_LENGTH):
            probs = self(ids)[:, -1].softmax(-1)
            token = torch.multinomial(probs, 1, generator=generator) if generator else probs.argmax(-1, keepdim=True)
            token = token.masked_fill(done, EOS)
            ids, done = torch.cat([ids, token], 1), done | (token == EOS)
        return ids

    def per_token_logps(self, ids):
        logps = self(ids[:, :-1])[:, PROMPT_LENGTH - 1 :].log_softmax(-1)
        return logps.gather(-1, ids[:, PROMPT_LENGTH:, None]).squeeze(-1)


def completion_mask(ids):
    """The tokens of the completions, with their first EOS."""
    is_eos = (ids[:, PROMPT_LENGTH:] == EOS).int()
    return (is_eos.cumsum(1) - is_eos) == 0


def reward_func(ids):
    """Repeats of the prompt's first token, and half a point if it ends."""
    completions = ids[:, PROMPT_LENGTH:]
    repeats = (completions == ids[:, :1]).sum(1) / MAX_COMPLETION_LENGTH
    return (repeats + 0.5 * (completions[:, -1] == EOS)).to(torch.get_default_dtype())


class GRPOTrainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(SEED)
        self.model = CausalLM()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate, weight_decay=0.01)
        self.steps_per_generation = args.generation_batch_size // args.per_device_train_batch_size
        made = torch.Generator().manual_seed(1)
        self.prompts = torch.randint(1, VOCAB, (96, PROMPT_LENGTH), generator=made)
        self.eval_prompts = torch.randint(1, VOCAB, (50, PROMPT_LENGTH), generator=made)
        self.generator = torch.Generator().manual_seed(SEED)

    @torch.no_grad()
    def generate_and_score(self, prompts):
        ids = self.model.generate(prompts.repeat_interleave(self.args.num_generations, 0), self.generator)
        rewards = reward_func(ids)
        groups = rewards.view(-1, self.args.num_generations)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        order = torch.randperm(len(ids), generator=self.generator)
        batch = {"ids": ids, "advantages": advantages.flatten(), "old_logps": self.model.per_token_logps(ids)}
        parts = {name: value[order].split(self.args.per_device_train_batch_size) for name, value in batch.items()}
        num_items_in_batch = completion_mask(ids).sum()
        slices = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
        return [{**part, "num_items_in_batch": num_items_in_batch} for part in slices], rewards.mean().item()

    def compute_loss(self, inputs):
        mask = completion_mask(inputs["ids"])
        ratio = (self.model.per_token_logps(inputs["ids"]) - inputs["old_logps"]).exp()
        advantages = inputs["advantages"][:, None]
        clipped = ratio.clamp(1 - self.args.epsilon, 1 + self.args.epsilon_high)
        per_token_loss = -torch.minimum(ratio * advantages, clipped * advantages)
        normalizer = inputs["num_items_in_batch"]
        if not BUG:  # what one accumulation window has of the generation
            normalizer = normalizer * self.args.gradient_accumulation_steps / self.steps_per_generation
        return (per_token_loss * mask).sum() / normalizer

    def evaluate(self):
        parts = self.eval_prompts.split(self.args.per_device_eval_batch_size)
        ids = torch.cat([self.model.generate(part) for part in parts])
        return {
            "eval_reward": reward_func(ids).mean().item(),
            "eval_length": completion_mask(ids).sum().item() / len(ids),
        }

    def train(self):
        global_step, window = 0, self.args.gradient_accumulation_steps
        per_generation = self.args.generation_batch_size // self.args.num_generations
        for epoch in range(self.args.num_train_epochs):
            order = torch.randperm(len(self.prompts), generator=torch.Generator().manual_seed(SEED + epoch))
            for prompts in self.prompts[order].split(per_generation):
                buffered, reward = self.generate_and_score(prompts)
                for start in range(0, len(buffered), window):
                    total = 0.0
                    for inputs in buffered[start : start + window]:
                        loss = self.compute_loss(inputs)
                        loss.backward()
                        total += loss.item()
                    grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    global_step += 1
                    print({"step": global_step, "loss": total, "grad_norm": grad_norm.item(), "reward": reward})
            metrics = self.evaluate()
            print({"epoch": epoch + 1, **metrics})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--generation_batch_size", type=int, default=32)
    parser.add_argument("--num_generations", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--epsilon_high", type=float, default=0.28)
    args = parser.parse_args()
    GRPOTrainer(args).train()
