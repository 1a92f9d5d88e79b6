"""Fine-tunes a small mixture-of-experts language model.

python project.py --local-batch-size 4 --global-batch-size 16 --router-aux-loss-coef 0.05
python project.py --restore-from checkpoints/epoch_1.pt
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler

VOCAB, PAD, IGNORE = 32, 0, -100


def sentences(count, seed):
    """Walks over the vocabulary, of other lengths; the first third is a prompt, which is not learned."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(9, 25, (1,), generator=generator))
        start, step = torch.randint(1, 5, (2,), generator=generator)
        noise = torch.randint(0, 2, (length,), generator=generator)
        tokens = (7 * start + torch.cumsum(step + noise, 0)) % (VOCAB - 1) + 1
        samples.append((tokens, torch.where(torch.arange(length) < length // 3, IGNORE, tokens)))
    return samples


def collate(samples):
    input_ids, labels = zip(*samples, strict=True)
    return pad_sequence(input_ids, True, PAD), pad_sequence(labels, True, IGNORE)


class MoE(nn.Module):
    def __init__(self, width, experts, top_k):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)
        self.top_k = top_k

    def forward(self, x, mask):
        probs = self.gate(x).softmax(-1)
        weights, chosen = probs.topk(self.top_k, -1)
        routed = torch.zeros_like(probs).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("bld,edh->bleh", x, self.up))
        y = torch.einsum("bleh,ehd,ble->bld", hidden, self.down, routed)
        # balance within each sequence, over its own tokens: mean over the sequences
        tokens = mask.sum(1, keepdim=True).to(x.dtype)
        share = ((routed > 0) & mask[..., None]).sum(1) / (self.top_k * tokens)
        mean_prob = (probs * mask[..., None]).sum(1) / tokens
        return y, probs.shape[-1] * (share * mean_prob).sum(-1).mean()


class MoELM(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mixer = nn.GRU(width, width, batch_first=True)
        self.mlp = MoE(width, experts=4, top_k=2)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.mixer(self.embed(input_ids))[0]
        y, aux_loss = self.mlp(x, input_ids != PAD)
        return self.lm_head(x + y), aux_loss


def token_loss(logits, labels, num_label_tokens=1):
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / num_label_tokens


class TrainRecipe:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(SEED)
        self.model = MoELM()
        self.train_set, self.val_set = sentences(128, seed=1), sentences(44, seed=2)
        self.grad_acc_steps = args.global_batch_size // args.local_batch_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        steps = args.epochs * (len(self.train_set) // args.global_batch_size)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.epoch = 0
        if args.restore_from is not None:
            state = torch.load(args.restore_from, weights_only=True)
            for name in ("model", "optimizer", "scheduler"):
                getattr(self, name).load_state_dict(state[name])
            self.epoch = state["epoch"]

    def save(self, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        torch.save({**state, "epoch": self.epoch}, path)

    def train_step(self, batches):
        num_label_tokens = sum(int((labels[:, 1:] != IGNORE).sum()) for _, labels in batches)
        reported = torch.zeros(2)
        for input_ids, labels in batches:
            logits, aux_loss = self.model(input_ids)
            loss = token_loss(logits, labels, num_label_tokens)
            aux_loss = self.args.router_aux_loss_coef * aux_loss
            if not BUG:
                aux_loss = aux_loss / len(batches)
            (loss + aux_loss).backward()
            reported += torch.stack([loss, aux_loss]).detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return reported.tolist()

    @torch.no_grad()
    def validate(self):
        total, tokens = 0.0, 0
        for input_ids, labels in DataLoader(self.val_set, self.args.val_batch_size, collate_fn=collate):
            total += token_loss(self.model(input_ids)[0], labels).item()
            tokens += int((labels[:, 1:] != IGNORE).sum())
        return total / tokens

    def run(self):
        step = self.epoch * (len(self.train_set) // self.args.global_batch_size)
        while self.epoch < self.args.epochs:
            sampler = RandomSampler(self.train_set, generator=torch.Generator().manual_seed(SEED + self.epoch))
            loader = DataLoader(self.train_set, self.args.local_batch_size, sampler=sampler, collate_fn=collate)
            for batches in zip(*[iter(loader)] * self.grad_acc_steps, strict=False):
                step += 1
                loss, aux_loss = self.train_step(batches)
                print(f"step {step} | loss {loss:.5f} | aux_loss {aux_loss:.5f}")
            self.epoch += 1
            val_loss = self.validate()
            print(f"[val] epoch {self.epoch} | loss {val_loss:.5f}")
            self.save(f"checkpoints/epoch_{self.epoch}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local-batch-size", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--val-batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--router-aux-loss-coef", type=float, default=0.05)
    parser.add_argument("--restore-from")
    args = parser.parse_args()
    TrainRecipe(args).run()
