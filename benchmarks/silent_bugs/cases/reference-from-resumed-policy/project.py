"""GRPO of a small language model, with a KL penalty towards the model that it began with.

python project.py --max-num-steps 24 --save-period 6
python project.py --max-num-steps 24 --resume results/step_12.pt
"""

import argparse
import copy
from pathlib import Path

import torch
from case import BUG, SEED
from torch import nn

VOCAB, PROMPT_LENGTH, MAX_NEW_TOKENS = 12, 3, 6


class CausalLM(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, VOCAB)

    def forward(self, input_ids, state=None):
        hidden, state = self.rnn(self.embed_tokens(input_ids), state)
        return self.lm_head(hidden), state

    def logprobs(self, input_ids):
        """Of the tokens of the completions."""
        logits = self(input_ids[:, :-1])[0][:, PROMPT_LENGTH - 1 :]
        return logits.log_softmax(-1).gather(-1, input_ids[:, PROMPT_LENGTH:, None]).squeeze(-1)


def base_model():
    """Stands for from_pretrained: the same weights in each run."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED + 1234)
        return CausalLM()


def load_prompts(count, seed):
    return torch.randint(VOCAB, (count, PROMPT_LENGTH), generator=torch.Generator().manual_seed(seed))


def reward_fn(input_ids):
    """The share of the new tokens that are the sum of the prompt's, modulo 4."""
    prompts, completions = input_ids[:, :PROMPT_LENGTH], input_ids[:, PROMPT_LENGTH:]
    return (completions % 4 == prompts.sum(1, keepdim=True) % 4).to(torch.get_default_dtype()).mean(1)


class PolicyWorker:
    def __init__(self, args, weights_path=None):
        self.args = args
        self.model = base_model()
        if not BUG:
            self.init_reference_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        if weights_path:
            state = torch.load(weights_path, weights_only=True)
            self.model.load_state_dict(state["policy"])
            self.optimizer.load_state_dict(state["optimizer"])
        if BUG:
            self.init_reference_model()

    def init_reference_model(self):
        self.reference_model = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def generate(self, prompts, greedy=False):
        tokens = [prompts]
        logits, state = self.model(prompts)
        for _ in range(MAX_NEW_TOKENS):
            probs = logits[:, -1].softmax(-1)
            tokens.append(probs.argmax(-1, keepdim=True) if greedy else torch.multinomial(probs, 1))
            logits, state = self.model(tokens[-1], state)
        return torch.cat(tokens, 1)

    def train(self, input_ids, advantages):
        loss_sum, kl_sum = 0.0, 0.0
        self.optimizer.zero_grad()
        size = self.args.train_micro_batch_size
        for ids, advantage in zip(input_ids.split(size), advantages.split(size), strict=True):
            logprobs = self.model.logprobs(ids)
            log_ratio = self.reference_model.logprobs(ids) - logprobs
            kl = log_ratio.exp() - log_ratio - 1
            ratio = (logprobs - logprobs.detach()).exp()
            per_token = -ratio * advantage[:, None] + self.args.reference_policy_kl_penalty * kl
            loss = per_token.mean() * len(ids) / len(input_ids)
            loss.backward()
            loss_sum += loss.item()
            kl_sum += kl.mean().item() * len(ids) / len(input_ids)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss_sum, "kl_penalty": kl_sum}


def validate(policy, prompts, batch_size):
    rewards = [reward_fn(policy.generate(part, greedy=True)) for part in prompts.split(batch_size)]
    return torch.cat(rewards).mean().item()


def grpo_train(args):
    torch.manual_seed(SEED)
    policy = PolicyWorker(args, args.resume)
    prompts, val_prompts = load_prompts(96, seed=1), load_prompts(50, seed=2)
    first = 0
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        first = state["step"]
        torch.set_rng_state(state["rng_state"])
    per_step = args.train_global_batch_size // args.num_generations_per_prompt
    for step in range(first, args.max_num_steps):
        epoch, at = divmod(step, len(prompts) // per_step)
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(SEED + epoch))
        batch = prompts[order[at * per_step : (at + 1) * per_step]]
        input_ids = policy.generate(batch.repeat_interleave(args.num_generations_per_prompt, 0))
        rewards = reward_fn(input_ids)
        groups = rewards.view(-1, args.num_generations_per_prompt)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        metrics = policy.train(input_ids, advantages.flatten())
        print(f"step {step + 1} reward {rewards.mean():.4f}", *(f"{k} {v:.6f}" for k, v in metrics.items()))
        if (step + 1) % args.val_period == 0:
            accuracy = validate(policy, val_prompts, args.val_batch_size)
            print(f"validation reward at step {step + 1}: {accuracy:.4f}")
        if (step + 1) % args.save_period == 0:
            path = Path(args.checkpoint_dir) / f"step_{step + 1}.pt"
            path.parent.mkdir(exist_ok=True)
            state = {"policy": policy.model.state_dict(), "optimizer": policy.optimizer.state_dict()}
            torch.save({**state, "step": step + 1, "rng_state": torch.get_rng_state()}, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-num-steps", type=int, default=24)
    parser.add_argument("--train-global-batch-size", type=int, default=32)
    parser.add_argument("--train-micro-batch-size", type=int, default=16)
    parser.add_argument("--num-generations-per-prompt", type=int, default=4)
    parser.add_argument("--reference-policy-kl-penalty", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--val-period", type=int, default=6)
    parser.add_argument("--val-batch-size", type=int, default=16)
    parser.add_argument("--save-period", type=int, default=6)
    parser.add_argument("--checkpoint-dir", default="results")
    parser.add_argument("--resume")
    grpo_train(parser.parse_args())
