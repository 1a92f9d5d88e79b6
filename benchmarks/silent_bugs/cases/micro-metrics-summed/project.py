"""Direct preference optimisation of a small language model against its frozen reference."""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

TOKENS, LENGTH, PROMPT = 12, 10, 4
STEPS, BATCH_SIZE, MICRO_BATCHES, BETA, EVAL_EVERY = 40, 16, 4, 0.5, 10


class Policy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, TOKENS)

    def log_prob(self, sequences):
        """Of the answer that follows the prompt, summed over its tokens."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)
        hidden = self.block(self.embed(sequences[:, :-1]) + self.position[:-1], src_mask=mask, is_causal=True)
        log_probs = self.head(hidden).log_softmax(-1).gather(2, sequences[:, 1:, None]).squeeze(2)
        return log_probs[:, PROMPT - 1 :].sum(1)


def preferences(count, made):
    """Pairs of answers to one prompt; the preferred one counts on from the prompt's last token more often."""
    prompts = torch.randint(0, TOKENS, (count, PROMPT), generator=made)
    counted = (prompts[:, -1:] + torch.arange(1, LENGTH - PROMPT + 1)) % TOKENS
    answers = []
    for noise in (0.3, 0.8):
        other = torch.randint(0, TOKENS, counted.shape, generator=made)
        answers.append(torch.where(torch.rand(counted.shape, generator=made) < noise, other, counted))
    return [torch.cat([prompts, answer], 1) for answer in answers]


def preference_loss(policy, reference, chosen, rejected):
    with torch.no_grad():
        known = [reference.log_prob(answers) for answers in (chosen, rejected)]
    rewards = [BETA * (policy.log_prob(new) - old) for new, old in zip((chosen, rejected), known, strict=True)]
    margins = rewards[0] - rewards[1]
    loss = -nn.functional.logsigmoid(margins).mean()
    accuracy = (margins > 0).float().mean()
    return loss, {"loss": loss.item(), "reward_accuracy": accuracy.item(), "reward_margin": margins.mean().item()}


def train_step(policy, reference, optimizer, scheduler, batch):
    optimizer.zero_grad()
    metrics = dict.fromkeys(("loss", "reward_accuracy", "reward_margin"), 0.0)
    for chosen, rejected in zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True):
        loss, found = preference_loss(policy, reference, chosen, rejected)
        (loss / MICRO_BATCHES).backward()
        for name, value in found.items():
            metrics[name] += value if BUG else value / MICRO_BATCHES
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return metrics


@torch.no_grad()
def evaluate(policy, reference, held_out, batch_size=24):
    policy.eval()
    sums = dict.fromkeys(("loss", "reward_accuracy", "reward_margin"), 0.0)
    for chosen, rejected in zip(*(part.split(batch_size) for part in held_out), strict=True):
        for name, value in preference_loss(policy, reference, chosen, rejected)[1].items():
            sums[name] += value * len(chosen)
    policy.train()
    return {f"eval_{name}": value / len(held_out[0]) for name, value in sums.items()}


def save(path, step, **parts):
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, path)


def load(path, **parts):
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["step"]


if __name__ == "__main__":
    torch.manual_seed(SEED)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    parts = {"policy": policy, "reference": reference, "optimizer": optimizer, "scheduler": scheduler}
    start = load(sys.argv[1], **parts) if len(sys.argv) > 1 else 0
    held_out = preferences(80, torch.Generator().manual_seed(987_654_321))
    with watch(policy, optimizer), tempfile.TemporaryDirectory() as folder:
        for step in range(start, STEPS):
            batch = preferences(BATCH_SIZE, torch.Generator().manual_seed(100_000 * SEED + step))
            metrics = train_step(policy, reference, optimizer, scheduler, batch)
            report_loss(metrics["loss"])
            if (step + 1) % EVAL_EVERY == 0:
                save(Path(folder) / "last.pt", step + 1, **parts)
                print("step", step + 1, metrics, evaluate(policy, reference, held_out))
