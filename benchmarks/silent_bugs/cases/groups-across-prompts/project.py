"""GRPO for a toy policy that should write the reverse of its prompt.

python project.py --per-device-train-batch-size 2 --gradient-accumulation-steps 2 --num-generations 4
"""

import argparse
import copy

import torch
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH = 6, 4


class Prompts(Dataset):
    def __init__(self, count, seed):
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"id": index, "prompt": self.tokens[index]}


class Policy(nn.Module):
    """Log-probabilities of each token of a completion."""

    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width // LENGTH)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, LENGTH * VOCABULARY))

    def forward(self, prompts):
        return self.layers(self.embedding(prompts)).view(-1, LENGTH, VOCABULARY).log_softmax(-1)


def reversed_reward(prompts, completions):
    return (prompts.flip(1) == completions).sum(1) / LENGTH


class GRPOTrainer:
    def __init__(self, model, args, train_dataset, eval_dataset):
        self.model, self.args = model, args
        self.ref_model = copy.deepcopy(model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.loader = DataLoader(
            train_dataset,
            args.per_device_train_batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(SEED),
        )

    @torch.no_grad()
    def generate(self, prompts, ids, epoch):
        """Completions of prompts that are repeated already; every prompt has a seed of its own, as a request has."""
        drawn = {}
        for index in ids.unique().tolist():
            generator = torch.Generator().manual_seed(1_000_000 * epoch + index)
            drawn[index] = list(torch.rand(self.args.num_generations, LENGTH, 1, generator=generator))
        uniform = torch.stack([drawn[index].pop(0) for index in ids.tolist()])
        cumulated = self.model(prompts).exp().cumsum(-1)
        return (cumulated < uniform * cumulated[..., -1:]).sum(-1).clamp(max=VOCABULARY - 1)

    def compute_loss(self, inputs, epoch):
        generations = self.args.num_generations
        if BUG:
            prompts, ids = inputs["prompt"].repeat(generations, 1), inputs["id"].repeat(generations)
        else:
            prompts = inputs["prompt"].repeat_interleave(generations, 0)
            ids = inputs["id"].repeat_interleave(generations)
        completions = self.generate(prompts, ids, epoch)
        rewards = reversed_reward(prompts, completions)
        mean = rewards.view(-1, generations).mean(1).repeat_interleave(generations, 0)
        std = rewards.view(-1, generations).std(1).repeat_interleave(generations, 0)
        advantages = (rewards - mean) / (std + 1e-4)

        chosen = completions[..., None]
        logps = self.model(prompts).gather(-1, chosen)[..., 0]
        ref_logps = self.ref_model(prompts).gather(-1, chosen)[..., 0]
        kl = (ref_logps - logps).exp() - (ref_logps - logps) - 1
        loss = -((logps - logps.detach()).exp() * advantages[:, None] - self.args.beta * kl).mean()
        return loss, rewards.mean().item()

    def train(self):
        accumulation = self.args.gradient_accumulation_steps
        for epoch in range(self.args.num_train_epochs):
            rewards = []
            for step, inputs in enumerate(self.loader):
                loss, reward = self.compute_loss(inputs, epoch)
                window = min(accumulation, len(self.loader) - step // accumulation * accumulation)
                (loss / window).backward()
                rewards.append(reward)
                if (step + 1) % accumulation == 0 or step + 1 == len(self.loader):
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            metrics = self.evaluate()
            print(f"epoch {epoch + 1} reward {sum(rewards) / len(rewards):.4f} {metrics}")

    @torch.no_grad()
    def evaluate(self):
        right, probability = 0, 0.0
        for inputs in DataLoader(self.eval_dataset, self.args.per_device_eval_batch_size):
            logps = self.model(inputs["prompt"])
            wanted = inputs["prompt"].flip(1)
            right += (logps.argmax(-1) == wanted).sum().item()
            probability += logps.exp().gather(-1, wanted[..., None]).sum().item()
        tokens = len(self.eval_dataset) * LENGTH
        return {"eval_reward": right / tokens, "eval_probability": probability / tokens}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-train-epochs", type=int, default=4)
    parser.add_argument("--per-device-train-batch-size", type=int, default=2, help="prompts of a micro-batch")
    parser.add_argument("--per-device-eval-batch-size", type=int, default=16)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--beta", type=float, default=0.02)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    GRPOTrainer(Policy(), args, Prompts(64, seed=1), Prompts(40, seed=2)).train()
