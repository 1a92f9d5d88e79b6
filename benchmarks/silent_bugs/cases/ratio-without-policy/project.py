"""A small language model is rewarded for words of its prompt's class (GRPO, with a penalty for going astray)."""

import copy

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

WORDS, LENGTH, GROUP, PROMPTS, EPOCHS, INNER = 12, 6, 8, 4, 3, 2
IMPORTANCE_SAMPLING_LEVEL = None if BUG else "token"
BETA, EPSILON, EVALUATE_EVERY = 0.02, 0.2, 1


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        self.cell = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, words):
        return self.head(self.cell(self.embed(words))[0])


def reward_of(prompts, answers):
    return (answers % 3 == prompts[:, None] % 3).float().mean(1)


@torch.no_grad()
def write(model, prompts, made=None):
    words = prompts[:, None]
    for _ in range(LENGTH):
        logits = model(words)[:, -1]
        word = logits.argmax(1, True) if made is None else torch.multinomial(logits.softmax(1), 1, generator=made)
        words = torch.cat([words, word], 1)
    return words


def log_probs(model, words):
    chosen = model(words[:, :-1]).log_softmax(-1)
    return chosen.gather(2, words[:, 1:, None])[..., 0]


def grpo_loss(now, then, reference, advantages, level):
    log_ratio = now - then
    if level is None:
        log_weights = torch.zeros_like(log_ratio)
    elif level == "token":
        log_weights = log_ratio
    elif level == "sequence":
        log_weights = log_ratio.mean(1, keepdim=True)
    else:
        raise ValueError(level)
    ratio = log_weights.exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    gain = torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    away = (reference - now).exp() - (reference - now) - 1
    return (BETA * away - gain).mean()


def evaluate(model, prompts):
    return reward_of(prompts, write(model, prompts)[:, 1:]).mean().item()


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = Writer()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    prompts, held_out = torch.arange(32) % WORDS, torch.arange(WORDS)
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            made = torch.Generator().manual_seed(100 * SEED + epoch)
            for chosen in prompts[torch.randperm(32, generator=made)].split(PROMPTS):
                words = write(model, chosen.repeat_interleave(GROUP), made)
                rewards = reward_of(words[:, 0], words[:, 1:]).view(-1, GROUP)
                advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
                with torch.no_grad():
                    then, away_from = log_probs(model, words), log_probs(reference, words)
                for _ in range(INNER):
                    now = log_probs(model, words)
                    loss = grpo_loss(now, then, away_from, advantages.flatten(), IMPORTANCE_SAMPLING_LEVEL)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    report_loss(loss.item())
            if (epoch + 1) % EVALUATE_EVERY == 0:
                print(f"epoch {epoch}: reward {evaluate(model, held_out):.3f}")
